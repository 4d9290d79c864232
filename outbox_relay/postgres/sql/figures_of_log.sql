-- The size of the log, with indexes.
select coalesce(sum(pg_total_relation_size(i.inhrelid)), 0)::bigint as bytes
  from pg_catalog.pg_inherits i where i.inhparent = 'outbox.event'::regclass
