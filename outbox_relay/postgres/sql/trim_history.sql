-- Removes old minutes of the history.
select outbox.trim_history(%(most)s::integer)
