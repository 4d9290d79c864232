-- The schedules that fire within %(ahead)s seconds, and the seconds until then. On-time ones come first, then those without a
-- next time, then late ones, those with a long list of missed times last: no time is missed because others were. What failed
-- comes after all of them.
with clock as materialized (select clock_timestamp() as now_at)
select s.name, s.cron, s.timezone, s.missed, s.generation, s.after_at, s.next_at, c.now_at as now,
       coalesce(extract(epoch from greatest(s.next_at, s.retry_at) - c.now_at), 0)::double precision as seconds
  from outbox.schedule s cross join clock c
 where not s.paused
   and (s.next_at is null
        or greatest(s.next_at, s.retry_at) <= c.now_at + make_interval(secs => %(ahead)s::double precision))
 order by s.error is not null, s.next_at is null, s.next_at < c.now_at - make_interval(secs => %(late)s::double precision),
          s.missed = 'all', s.next_at, s.name
 limit %(most)s::integer
