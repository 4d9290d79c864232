-- The time for which partitions exist in advance, without a gap. Today counts as if it had one: with events of it in the
-- DEFAULT partition it gets none.
with recursive parts as materialized (
    select p.begins, p.ends
      from pg_catalog.pg_inherits i
      join pg_catalog.pg_class c on c.oid = i.inhrelid
     cross join lateral (
        select (regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''([^'']*)''\)'))[1]::timestamptz as begins,
               (regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([^'']*)''\)'))[1]::timestamptz as ends offset 0
     ) p
     where i.inhparent = 'outbox.event'::regclass
),
covered (ends) as (
    select coalesce(
        (select p.ends from parts p where p.begins <= clock_timestamp() and p.ends > clock_timestamp()),
        date_trunc('day', clock_timestamp(), 'UTC') + interval '1 day')
    union
    select p.ends from covered c join parts p on p.begins = c.ends
)
select extract(epoch from max(c.ends) - clock_timestamp())::double precision as ahead from covered c
