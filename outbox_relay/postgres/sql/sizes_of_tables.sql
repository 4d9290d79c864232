-- The tables of the schema, partitions under their parent: rows as estimated, bytes with indexes, and the last vacuum.
select quote_ident(coalesce(p.relname, c.relname)) as name, sum(s.n_live_tup)::bigint as live, sum(s.n_dead_tup)::bigint as dead,
       sum(pg_catalog.pg_total_relation_size(s.relid))::bigint as bytes, count(*)::integer as parts,
       max(greatest(s.last_autovacuum, s.last_vacuum)) as vacuumed_at
  from pg_catalog.pg_stat_user_tables s
  join pg_catalog.pg_class c on c.oid = s.relid
  left join pg_catalog.pg_inherits i on i.inhrelid = c.oid
  left join pg_catalog.pg_class p on p.oid = i.inhparent
 where s.schemaname = 'outbox'
 group by 1
 order by 4 desc, 1
