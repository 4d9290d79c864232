-- Those of these names that removed sinks had.
select name from outbox.former_sink where name = any (%(sinks)s::text[])
