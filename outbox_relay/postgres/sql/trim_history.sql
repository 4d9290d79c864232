-- Removes old minutes of the history.
select outbox_internal.trim_history(%(most)s::integer)
