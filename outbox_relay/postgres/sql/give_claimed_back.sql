-- End the leases of claimed rows whose delivery ended without an outcome in a relay that still runs. The claim does not
-- count. After a rename the rows are those of the new name, with their leases.
with named as materialized (
    select coalesce((select f.renamed_to from outbox.former_sink f where f.name = %(sink)s::text), %(sink)s::text) as sink
)
update outbox.delivery d
   set lease = null, lease_until = null, owner = null, claims = greatest(d.claims - 1, 0)
  from unnest(%(ids)s::bigint[], %(leases)s::uuid[]) r (id, lease)
 where d.sink = (select n.sink from named n) and d.id = any (%(ids)s::bigint[]) and d.id = r.id and d.lease = r.lease
