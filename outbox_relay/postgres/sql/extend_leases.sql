-- Extend the leases of rows whose deliveries take longer, if they are still valid. After a rename the rows are
-- those of the new name, with their leases.
with named as materialized (
    select coalesce((select f.renamed_to from outbox.former_sink f where f.name = %(sink)s::text), %(sink)s::text) as sink
)
update outbox.delivery d
   set lease_until = greatest(d.lease_until, clock_timestamp() + r.seconds * interval '1 second')
  from unnest(%(ids)s::bigint[], %(leases)s::uuid[], %(seconds)s::double precision[]) r (id, lease, seconds)
 where d.sink = (select n.sink from named n) and d.id = any (%(ids)s::bigint[]) and d.id = r.id and d.lease = r.lease
returning d.id
