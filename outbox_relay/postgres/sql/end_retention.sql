-- Give the lease of the retention back.
select outbox.end_retention(%(lease)s::bigint)
