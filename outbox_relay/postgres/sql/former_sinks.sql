-- Those of these names that sinks had, with their new names; null: the sink was removed.
select name, renamed_to from outbox.former_sink where name = any (%(sinks)s::text[])
