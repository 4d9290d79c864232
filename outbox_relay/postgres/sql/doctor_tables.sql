-- Dead rows of the tables, partitions under their parent.
select quote_ident(coalesce(p.relname, c.relname)) as name, sum(s.n_dead_tup)::bigint as dead, sum(s.n_live_tup)::bigint as live,
       extract(epoch from clock_timestamp() - max(greatest(s.last_autovacuum, s.last_vacuum)))::double precision as vacuumed
  from pg_catalog.pg_stat_user_tables s
  join pg_catalog.pg_class c on c.oid = s.relid
  left join pg_catalog.pg_inherits i on i.inhrelid = c.oid
  left join pg_catalog.pg_class p on p.oid = i.inhparent
 where s.schemaname = 'outbox'
 group by 1
having sum(s.n_dead_tup) > %(dead)s::bigint and sum(s.n_dead_tup) > sum(s.n_live_tup)
 order by 2 desc
