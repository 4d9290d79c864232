-- Empty a checked day, or say why not.
select outbox_internal.empty_day(%(day)s::date, %(lease)s::bigint, %(events)s::bigint)
