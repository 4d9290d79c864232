-- End the leases of claims of a queue that were not answered. Their rows were not tried, so the claim does not count.
-- After a rename the rows are those of the new name, with their leases.
select outbox_internal.give_queued_back(
           coalesce((select f.renamed_to from outbox.former_sink f where f.name = %(sink)s::text), %(sink)s::text),
           %(owner)s::uuid, %(leases)s::uuid[])
