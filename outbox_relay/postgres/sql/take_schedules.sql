-- Return those schedules that have the definitions of a relay's file, with their generations. Each object has the fields of
-- register_schedules.sql, and `seen`, a generation: a schedule that still has it is given this definition if `over`, with
-- a new generation, as there.
with wanted as materialized (
    select w.* from jsonb_to_recordset(%(wanted)s::jsonb) w (
        name text, cron text, timezone text, type text, payload jsonb, headers jsonb, key text, missed text, tenant text,
        seen bigint, over boolean)
),
locked as materialized (
    select s.name from outbox.schedule s join wanted w on w.name = s.name and w.over and w.seen = s.generation
     order by s.name for update of s
),
changed as (
    update outbox.schedule s
       set cron = w.cron, timezone = w.timezone, type = w.type, payload = w.payload, headers = w.headers, key = w.key,
           missed = w.missed, tenant = w.tenant, generation = nextval('outbox.schedule_generation'),
           after_at = case when (s.cron, s.timezone) = (w.cron, w.timezone) then s.after_at
                           else greatest(clock_timestamp(), s.after_at) end,
           next_at = case when (s.cron, s.timezone) = (w.cron, w.timezone) then s.next_at end,
           retry_at = null, error = null, error_at = null
      from wanted w join locked l on l.name = w.name
     where s.name = w.name
       and (s.cron, s.timezone, s.type, s.payload, s.headers, s.key, s.missed, s.tenant)
           is distinct from (w.cron, w.timezone, w.type, w.payload, w.headers, w.key, w.missed, w.tenant)
    returning s.name, s.generation
)
select c.name, c.generation from changed c
union all
select s.name, s.generation
  from outbox.schedule s
  join wanted w on w.name = s.name
 where (s.cron, s.timezone, s.type, s.payload, s.headers, s.key, s.missed, s.tenant)
       is not distinct from (w.cron, w.timezone, w.type, w.payload, w.headers, w.key, w.missed, w.tenant)
