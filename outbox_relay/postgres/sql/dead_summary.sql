-- The deliveries that a filter means, by sink, type and kind of error.
select sink, type, state, error, status, example, count, first, last, exact from outbox.delivery_summary(%(filter)s::jsonb)
