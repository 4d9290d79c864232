-- The stored figures, and the database's time.
select f.figures, extract(epoch from clock_timestamp())::double precision as now from outbox.figures f
