-- The oldest transactions, prepared ones too, that keep VACUUM from removing rows. Whose sessions the role may not see
-- have no times, and are left out. VACUUM keeps none from another VACUUM. `held` is the number of transactions since the
-- oldest one whose dead rows it keeps, null if it keeps none; `dead` is the number of dead rows in the schema. `ending`
-- is the statement that ends this transaction, and no later one of its session.
select t.who, extract(epoch from clock_timestamp() - t.began)::double precision as seconds,
       t.held::bigint as held, t.ending,
       (select coalesce(sum(s.n_dead_tup), 0) from pg_catalog.pg_stat_user_tables s where s.schemaname = 'outbox')::bigint
           as dead
  from (
    select format('pid %%s, role %%s, %%s', a.pid, coalesce(a.usename::text, 'unknown'), coalesce(a.state, 'unknown')) as who,
           a.xact_start as began, greatest(age(a.backend_xmin), age(a.backend_xid)) as held,
           format('select pg_terminate_backend(pid) from pg_stat_activity where pid = %%s and xact_start = %%L',
                  a.pid, a.xact_start) as ending
      from pg_catalog.pg_stat_activity a
     where a.xact_start is not null and a.pid <> pg_backend_pid() and a.backend_type = 'client backend'
       and (a.datname = current_database() or a.backend_xid is not null)
       and not exists (select from pg_catalog.pg_stat_progress_vacuum v where v.pid = a.pid)
    union all
    select format('prepared transaction %%s, role %%s', p.gid, p.owner),
           p.prepared, age(p.transaction), format('rollback prepared %%L', p.gid)
      from pg_catalog.pg_prepared_xacts p where p.database = current_database()
  ) t
 where t.began < clock_timestamp() - make_interval(secs => %(seconds)s::double precision)
 order by t.began
 limit 5
