-- The reasons that keep a day. Without a lease nothing is recorded.
select * from outbox_internal.check_day(%(day)s::date, %(lease)s::bigint)
