-- The names that sinks had.
select name, removed_at, role_name, actor, renamed_to from outbox.former_sink order by name
