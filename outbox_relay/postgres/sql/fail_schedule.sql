-- Record why this relay did not fire a schedule.
select outbox_internal.fail_schedule(%(name)s, %(generation)s::bigint, %(after)s::timestamptz, %(next)s::timestamptz, %(reason)s)
