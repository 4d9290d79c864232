-- The schedules that are next to fire, and the seconds until then. Those without a next time come first.
with clock as materialized (select clock_timestamp() as now_at)
select s.name, s.cron, s.timezone, s.missed, s.generation, s.after_at, s.next_at, c.now_at,
       coalesce(extract(epoch from greatest(s.next_at, s.retry_at) - c.now_at), 0)::double precision as seconds
  from outbox.schedule s cross join clock c
 where not s.paused
 order by s.next_at is not null, greatest(s.next_at, s.retry_at), s.name
 limit %(most)s
