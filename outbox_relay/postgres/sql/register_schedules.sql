-- Register the schedules of a relay's file: objects with name, cron, timezone, type, payload, headers, key, missed and tenant.
-- The relay that started or was reloaded last decides, as for sinks. Other schedules stay as they are. A changed definition
-- has a new generation. Times begin after now only if cron or timezone is new: a changed payload must not drop a time that
-- is due.
insert into outbox.schedule as s (name, cron, timezone, type, payload, headers, key, missed, tenant)
select w.name, w.cron, w.timezone, w.type, w.payload, w.headers, w.key, w.missed, w.tenant
  from jsonb_to_recordset(%(wanted)s::jsonb) w (
        name text, cron text, timezone text, type text, payload jsonb, headers jsonb, key text, missed text, tenant text)
 order by w.name
    on conflict (name) do update
   set cron = excluded.cron, timezone = excluded.timezone, type = excluded.type, payload = excluded.payload,
       headers = excluded.headers, key = excluded.key, missed = excluded.missed, tenant = excluded.tenant,
       generation = case when (s.cron, s.timezone, s.type, s.payload, s.headers, s.key, s.missed, s.tenant)
                              is distinct from (excluded.cron, excluded.timezone, excluded.type, excluded.payload,
                                                excluded.headers, excluded.key, excluded.missed, excluded.tenant)
                         then nextval('outbox.schedule_generation') else s.generation end,
       after_at = case when (s.cron, s.timezone) = (excluded.cron, excluded.timezone) then s.after_at
                       else greatest(clock_timestamp(), s.after_at) end,
       next_at = case when (s.cron, s.timezone) = (excluded.cron, excluded.timezone) then s.next_at end,
       retry_at = null, error = null, error_at = null
returning name, generation
