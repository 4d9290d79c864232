-- The names of all sinks.
select name from outbox.sink order by name
