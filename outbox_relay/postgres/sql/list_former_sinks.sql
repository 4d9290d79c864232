-- The names that removed sinks had.
select name, removed_at, role_name, actor from outbox.former_sink order by name
