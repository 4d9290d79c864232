-- The time for which partitions exist in advance; null if there is none but the DEFAULT partition.
select extract(epoch from max((regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([^'']*)''\)'))[1]::timestamptz)
                          - clock_timestamp())::double precision as ahead
  from pg_catalog.pg_inherits i join pg_catalog.pg_class c on c.oid = i.inhrelid
 where i.inhparent = 'outbox.event'::regclass
