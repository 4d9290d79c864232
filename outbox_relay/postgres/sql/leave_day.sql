-- Record why a pass left a day that nothing keeps.
select outbox_internal.leave_day(%(day)s::date, %(lease)s::bigint, %(reason)s::text)
