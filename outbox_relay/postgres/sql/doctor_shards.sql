-- The number of shards without an owner since some time, of each sink that is not paused. Of a shard that was released,
-- `lease_until` is the time of the release.
select s.sink, count(*)::integer as shards
  from outbox.shard s
  join outbox.sink k on k.name = s.sink and not k.paused
 where s.lease_until <= clock_timestamp() - %(seconds)s::double precision * interval '1 second'
 group by s.sink
 order by s.sink
