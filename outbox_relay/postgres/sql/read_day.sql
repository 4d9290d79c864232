-- The next events of a checked day, for its archive.
select * from outbox_internal.read_day_events(
    %(day)s::date, %(lease)s::bigint, %(after_id)s::bigint, %(after_uid)s::uuid, %(most)s::integer, %(bytes)s::bigint
)
