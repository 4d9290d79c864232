-- Adds rows to the present minute of the history.
select outbox.add_history(%(minute)s::jsonb)
