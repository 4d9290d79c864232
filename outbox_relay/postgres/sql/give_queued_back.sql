-- End the leases of claims of a queue that were not answered. Their rows were not tried, so the claim does not count.
select outbox_internal.give_queued_back(%(sink)s::text, %(owner)s::uuid, %(leases)s::uuid[])
