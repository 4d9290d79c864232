-- Remove marks of discarded events that the log no longer has; how many were removed.
select outbox_internal.trim_discarded(%(most)s::integer) as removed
