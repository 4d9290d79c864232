-- The age of the oldest transaction, prepared ones too, that keeps VACUUM from removing rows. No row for a role that may
-- not see the sessions of others.
select coalesce(max(t.seconds), 0)::double precision as seconds
  from (
    select extract(epoch from clock_timestamp() - a.xact_start) as seconds
      from pg_catalog.pg_stat_activity a
     where a.xact_start is not null and a.pid <> pg_backend_pid() and a.backend_type = 'client backend'
       and (a.datname = current_database() or a.backend_xid is not null)
       and not exists (select from pg_catalog.pg_stat_progress_vacuum v where v.pid = a.pid)
    union all
    select extract(epoch from clock_timestamp() - p.prepared)
      from pg_catalog.pg_prepared_xacts p where p.database = current_database()
  ) t
having pg_has_role(current_user, 'pg_read_all_stats', 'usage')
