-- Remove old recorded attempts, one step.
select outbox_internal.trim_attempts(%(lease)s::bigint) as removed
