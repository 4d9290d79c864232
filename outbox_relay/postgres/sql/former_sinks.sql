-- Those of these names that sinks had, and the names that lead on; null: the sink was removed.
select name, renamed_to from outbox.former_sink where name = any (%(sinks)s::text[])
