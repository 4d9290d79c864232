-- Rows whose delivery ended without an outcome, by a relay that goes on: no claim is counted against them.
update outbox.delivery
   set lease = null, lease_until = null, owner = null, claims = greatest(claims - 1, 0)
 where sink = %(sink)s and owner = %(owner)s::uuid
