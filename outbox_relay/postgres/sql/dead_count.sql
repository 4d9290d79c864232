-- The number of deliveries that a filter means, up to a limit, and a time before they were counted.
select matched, exact, now() as at from outbox.count_deliveries(%(filter)s::jsonb)
