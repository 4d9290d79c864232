-- The number of sessions that wait for a lock on a table of the schema, or for a transaction that changed rows of one.
select count(distinct l.pid)::bigint as waits
  from pg_catalog.pg_locks l
 where not l.granted and l.locktype in ('relation', 'tuple', 'transactionid')
   and exists (
        select from pg_catalog.pg_locks t
          join pg_catalog.pg_class c on c.oid = t.relation and c.relkind in ('r', 'p')
          join pg_catalog.pg_namespace n on n.oid = c.relnamespace and n.nspname = 'outbox'
         where t.pid = l.pid and t.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
           and (t.relation = l.relation or (l.relation is null and t.mode in ('RowShareLock', 'RowExclusiveLock'))))
