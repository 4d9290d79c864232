-- Sessions that wait for a lock on a table of the log, and the sessions that block them.
select a.pid, coalesce(a.usename::text, 'unknown') as role_name, l.relation::regclass::text as object,
       extract(epoch from clock_timestamp() - coalesce(a.state_change, a.query_start))::double precision as seconds,
       pg_catalog.pg_blocking_pids(a.pid) as blockers
  from pg_catalog.pg_locks l
  join pg_catalog.pg_class c on c.oid = l.relation
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace and n.nspname = 'outbox'
  join pg_catalog.pg_stat_activity a on a.pid = l.pid
 where not l.granted and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
   and clock_timestamp() - coalesce(a.state_change, a.query_start) > %(seconds)s::double precision * interval '1 second'
 order by 4 desc
 limit 5
