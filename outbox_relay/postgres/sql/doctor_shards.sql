-- The number of shards without an owner since some time, of each sink that is not paused, and whether a live relay serves
-- it.
select s.sink, count(*)::integer as shards,
       exists (
           select from outbox.relay r
            where s.sink = any (r.sinks)
              and r.seen_at > clock_timestamp() - %(alive)s::double precision * interval '1 second'
       ) as served
  from outbox.shard s
  join outbox.sink k on k.name = s.sink and not k.paused
  left join outbox.session n on n.sink = s.sink and n.owner = s.owner
 where coalesce(n.lease_until, s.released_at) <= clock_timestamp() - %(seconds)s::double precision * interval '1 second'
 group by s.sink
 order by s.sink
