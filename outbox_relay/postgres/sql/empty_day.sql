-- Empty a checked day, or say why not.
select outbox.empty_day(%(day)s::date, %(lease)s::bigint, %(events)s::bigint)
