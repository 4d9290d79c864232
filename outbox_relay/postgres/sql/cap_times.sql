-- Mend what was written while the clock was ahead, and would last until it is that time again: leases of shards end in the
-- time of the longest lease at most, and relays were seen now. Owners and relays that live renew both before they end.
with shards as (
    update outbox.shard set lease_until = clock_timestamp() + %(most)s::double precision * interval '1 second'
     where lease_until > clock_timestamp() + (%(most)s::double precision + 60) * interval '1 second'
    returning 1
),
relays as (
    update outbox.relay set seen_at = clock_timestamp() where seen_at > clock_timestamp() + interval '1 minute'
    returning 1
)
select (select count(*) from shards) + (select count(*) from relays) as capped
