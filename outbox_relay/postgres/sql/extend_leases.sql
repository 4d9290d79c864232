-- Extend the leases of rows whose deliveries take longer, if they are still valid.
update outbox.delivery d
   set lease_until = greatest(d.lease_until, clock_timestamp() + r.seconds * interval '1 second')
  from unnest(%(ids)s::bigint[], %(leases)s::uuid[], %(seconds)s::double precision[]) r (id, lease, seconds)
 where d.sink = %(sink)s::text and d.id = any (%(ids)s::bigint[]) and d.id = r.id and d.lease = r.lease
returning d.id
