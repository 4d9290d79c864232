-- The names that sinks had.
select name, removed_at, role_name, actor, renamed_to from outbox.list_former_sinks()
