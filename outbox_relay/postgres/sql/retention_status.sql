-- The policy, and each day with what keeps it.
select outbox.retention_status(%(live)s::boolean) as found
