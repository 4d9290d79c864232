-- Schedules by name after a name, or the one that is named, without their payloads and headers. `late` are the seconds since
-- the time that is due.
with clock as materialized (select clock_timestamp() as now_at)
select s.name, s.cron, s.timezone, s.type, s.key, s.tenant, s.missed, s.generation, s.paused, s.next_at, s.last_at, s.error,
       s.error_at, s.retry_at,
       case when not s.paused and s.next_at is not null
            then greatest(extract(epoch from c.now_at - s.next_at), 0)::double precision end as late
  from outbox.schedule s cross join clock c
 where s.name > %(after)s::text collate "C" and (%(name)s::text is null or s.name = %(name)s::text collate "C")
 order by s.name
 limit %(most)s::integer
