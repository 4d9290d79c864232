-- Write the first time of a schedule after its after_at.
select outbox_internal.place_schedule(%(name)s, %(seen)s::timestamptz, %(next)s::timestamptz, %(generation)s::bigint)
