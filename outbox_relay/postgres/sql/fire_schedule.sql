-- Emit the times of a schedule, and move it to the next one.
select outbox.fire_schedule(%(name)s, %(seen)s::timestamptz, %(next)s::timestamptz, %(generation)s::bigint,
                            %(times)s::timestamptz[])
