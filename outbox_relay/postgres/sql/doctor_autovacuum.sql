-- Tables, and partitions, for which autovacuum is off, or which it has not visited for `seconds` although their dead rows
-- are more than `dead` and more than twice its own limit. The time before the server started does not count.
select quote_ident(c.relname) as name, s.n_dead_tup::bigint as dead, o.enabled,
       extract(epoch from clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum))::double precision as visited
  from pg_catalog.pg_stat_user_tables s
  join pg_catalog.pg_class c on c.oid = s.relid
 cross join lateral (
    select coalesce((max(t.option_value) filter (where t.option_name = 'autovacuum_enabled'))::boolean, true) as enabled,
           coalesce(max(t.option_value) filter (where t.option_name = 'autovacuum_vacuum_threshold'),
                    current_setting('autovacuum_vacuum_threshold'))::double precision as base,
           coalesce(max(t.option_value) filter (where t.option_name = 'autovacuum_vacuum_scale_factor'),
                    current_setting('autovacuum_vacuum_scale_factor'))::double precision as scale
      from pg_catalog.pg_options_to_table(c.reloptions) t
 ) o
 where s.schemaname = 'outbox'
   and (not o.enabled
        or s.n_dead_tup > greatest(%(dead)s::bigint, 2 * (o.base + o.scale * greatest(c.reltuples, 0)))
           and greatest(s.last_autovacuum, s.last_vacuum, pg_postmaster_start_time())
               < clock_timestamp() - %(seconds)s::double precision * interval '1 second')
 order by o.enabled, s.n_dead_tup desc, c.relname
 limit 20
