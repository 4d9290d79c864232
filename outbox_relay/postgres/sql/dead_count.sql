-- The number of deliveries that a filter means, up to a limit.
select matched, exact from outbox.count_deliveries(%(filter)s::jsonb)
