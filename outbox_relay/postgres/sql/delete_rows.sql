-- Delete delivered rows if their leases are still valid.
delete from outbox.delivery d
 using unnest(%(ids)s::bigint[], %(leases)s::uuid[]) r (id, lease)
 where d.sink = %(sink)s and d.id = any (%(ids)s::bigint[]) and d.id = r.id and d.lease = r.lease
returning d.id
