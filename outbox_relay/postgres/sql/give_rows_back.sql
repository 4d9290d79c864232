-- End the leases of rows whose delivery ended without an outcome in a relay that still runs. The claim does not count.
select outbox_internal.give_rows_back(%(sink)s::text, %(owner)s::uuid)
