-- The names that sinks had.
select name, removed_at, role_name, actor, renamed_to from outbox_internal.list_former_sinks()
