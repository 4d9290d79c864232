-- Give the lease of the retention back.
select outbox_internal.end_retention(%(lease)s::bigint)
