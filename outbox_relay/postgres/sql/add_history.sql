-- Adds rows to the present minute of the history.
select outbox_internal.add_history(%(minute)s::jsonb)
