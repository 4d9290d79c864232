-- Renew the lease of the retention, or fail if another process has it.
select outbox_internal.renew_retention(%(lease)s::bigint)
