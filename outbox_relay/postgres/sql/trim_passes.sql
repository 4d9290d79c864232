-- Remove passes that no event of the log can need; how many were removed.
select outbox.trim_passes() as removed
