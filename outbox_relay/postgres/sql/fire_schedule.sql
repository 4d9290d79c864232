-- Emit the times of a schedule, and move it to the next one.
select outcome, emitted
  from outbox_internal.fire_schedule_times(%(name)s, %(seen)s::timestamptz, %(next)s::timestamptz, %(generation)s::bigint,
                                  %(times)s::timestamptz[])
