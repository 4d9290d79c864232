-- The lowest and the highest id of the log; of an empty log nothing lies between them.
select coalesce(min(e.id), 1) as first, coalesce(max(e.id), 0) as last from outbox.event e
