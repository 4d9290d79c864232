-- Sessions that wait for a lock on a table of the log or on rows of it, and the sessions that block them, 0 if a
-- prepared transaction does. `endings` are the statements that end the transactions that block, as far as the role may see
-- them and they do not wait themselves: those may be ahead in the queue only. A session that
-- waits for rows waits for the transaction that changed them, and has a lock on their table.
select w.pid, w.role_name, w.object, extract(epoch from clock_timestamp() - w.began)::double precision as seconds, b.blockers,
       array(
           select format('select pg_terminate_backend(pid) from pg_stat_activity where pid = %%s and xact_start = %%L',
                         a.pid, a.xact_start)
             from pg_catalog.pg_stat_activity a
            where a.pid = any (b.blockers) and a.xact_start is not null
              and not exists (select from pg_catalog.pg_locks q where q.pid = a.pid and not q.granted)
            order by a.xact_start
       ) as endings
  from (
    select l.pid, coalesce(a.usename::text, 'unknown') as role_name, l.waitstart as began,
           case when o.relation = l.relation then o.relation::regclass::text
                else format('rows of %%s', o.relation::regclass) end as object
      from pg_catalog.pg_locks l
      join pg_catalog.pg_stat_activity a on a.pid = l.pid
     cross join lateral (
        select t.relation
          from pg_catalog.pg_locks t
          join pg_catalog.pg_class c on c.oid = t.relation and c.relkind in ('r', 'p')
          join pg_catalog.pg_namespace n on n.oid = c.relnamespace and n.nspname = 'outbox'
         where t.pid = l.pid and t.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
           and (t.relation = l.relation or (l.relation is null and t.mode in ('RowShareLock', 'RowExclusiveLock')))
         order by t.relation
         limit 1
     ) o
     where not l.granted and l.locktype in ('relation', 'tuple', 'transactionid')
       and l.waitstart < clock_timestamp() - make_interval(secs => %(seconds)s::double precision)
  ) w
 cross join lateral (select pg_catalog.pg_blocking_pids(w.pid) as blockers) b
 order by w.began
 limit 5
