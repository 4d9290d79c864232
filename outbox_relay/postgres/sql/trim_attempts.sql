-- Remove old recorded attempts, one step.
select outbox.trim_attempts(%(lease)s::bigint) as removed
