-- The largest payload in bytes that an event may have here, by every setting of a database or a role that is kept;
-- what a session sets for itself is not known.
select max(bytes) as bytes
  from (select coalesce(nullif(current_setting('outbox.max_payload_bytes', true), ''), '1048576') as text
        union all
        select split_part(c.setting, '=', 2)
          from pg_db_role_setting s
         cross join unnest(s.setconfig) c (setting)
         where s.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
           and c.setting like 'outbox.max\_payload\_bytes=%%') t
 cross join lateral (select case when t.text ~ '^[0-9]{1,9}$' then t.text::integer end as bytes) b
