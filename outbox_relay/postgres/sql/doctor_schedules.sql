-- Schedules whose event the schema refuses, and those whose time came a while ago. A relay fires within a second.
with clock as materialized (select clock_timestamp() as now_at)
select s.name, s.error is not null as refused, s.error,
       extract(epoch from c.now_at - s.next_at)::double precision as late
  from outbox.schedule s cross join clock c
 where not s.paused
   and (s.error is not null or s.next_at < c.now_at - make_interval(secs => %(seconds)s))
 order by s.next_at
 limit 100
