-- Mend what was written while the clock was ahead, and would last until it is that time again: leases of shards end in the
-- time of the longest lease at most, shards without an owner are free, and relays were seen now. Owners and relays that live
-- renew both before they end.
with late as materialized (
    select s.sink, s.shard from outbox.shard s
     where (s.sink || '') = any (array(
            select k.name from outbox.sink k union all select '~' || r.id from outbox.replay r where not r.cleared))
       and s.lease_until > now() + interval '1 second'
       and s.lease_until > clock_timestamp() + case when s.owner is null then 1 else %(most)s::double precision + 60 end
                                               * interval '1 second'
     order by s.sink, s.shard
       for no key update skip locked
),
shards as (
    update outbox.shard s
       set lease_until = clock_timestamp() + case when s.owner is null then 0 else %(most)s::double precision end
                                             * interval '1 second'
      from late l
     where s.sink = l.sink and s.shard = l.shard
    returning 1
),
relays as (
    update outbox.relay set seen_at = clock_timestamp() where seen_at > clock_timestamp() + interval '1 minute'
    returning 1
)
select (select count(*) from shards) + (select count(*) from relays) as capped
