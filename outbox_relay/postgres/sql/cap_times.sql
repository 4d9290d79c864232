-- Mend what was written while the clock was ahead, and would last until it is that time again: sessions end in the time of the
-- longest lease at most, shards without an owner are free, and relays were seen now. Relays that live renew their sessions
-- before that.
with sessions as (
    update outbox.session set lease_until = clock_timestamp() + %(most)s::double precision * interval '1 second'
     where lease_until > clock_timestamp() + (%(most)s::double precision + 60) * interval '1 second'
    returning 1
),
late as materialized (
    select s.sink, s.shard from outbox.shard s
     where s.owner is null and s.released_at > clock_timestamp() + interval '1 second'
     order by s.sink, s.shard
       for no key update skip locked
),
shards as (
    update outbox.shard s set released_at = clock_timestamp()
      from late l
     where s.sink = l.sink and s.shard = l.shard
    returning 1
),
relays as (
    update outbox.relay set seen_at = clock_timestamp() where seen_at > clock_timestamp() + interval '1 minute'
    returning 1
)
select (select count(*) from sessions) + (select count(*) from shards) + (select count(*) from relays) as capped
