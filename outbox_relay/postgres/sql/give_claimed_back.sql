-- End the leases of claimed rows whose delivery ended without an outcome in a relay that still runs. The claim does not
-- count.
update outbox.delivery d
   set lease = null, lease_until = null, owner = null, claims = greatest(d.claims - 1, 0)
  from unnest(%(ids)s::bigint[], %(leases)s::uuid[]) r (id, lease)
 where d.sink = %(sink)s::text and d.id = any (%(ids)s::bigint[]) and d.id = r.id and d.lease = r.lease
