-- Dead rows of the tables, partitions under their parent.
select coalesce(p.relname, c.relname)::text as name, sum(s.n_dead_tup)::bigint as dead
  from pg_catalog.pg_stat_user_tables s
  join pg_catalog.pg_class c on c.oid = s.relid
  left join pg_catalog.pg_inherits i on i.inhrelid = c.oid
  left join pg_catalog.pg_class p on p.oid = i.inhparent
 where s.schemaname = 'outbox'
 group by 1
