-- Schedules that failed, and those whose time came a while ago, or is to be found since then. A relay fires within a second.
with clock as materialized (select clock_timestamp() as now_at)
select s.name, s.error, s.retry_at is not null as refused,
       extract(epoch from c.now_at - coalesce(s.next_at, s.after_at))::double precision as late
  from outbox.schedule s cross join clock c
 where not s.paused
   and (s.error is not null
        or coalesce(s.next_at, s.after_at) < c.now_at - make_interval(secs => %(seconds)s::double precision))
 order by s.error is null, coalesce(s.next_at, s.after_at), s.name
 limit 100
