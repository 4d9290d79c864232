-- The number of the next events of a checked day, and the last of them.
select * from outbox_internal.count_day(
    %(day)s::date, %(lease)s::bigint, %(after_id)s::bigint, %(after_uid)s::uuid, %(most)s::integer
)
