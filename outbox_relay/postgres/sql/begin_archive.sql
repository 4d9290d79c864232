-- Record the address of an archive before its first byte is written, and forget those whose objects were removed.
select outbox_internal.begin_archive(%(day)s::date, %(lease)s::bigint, %(address)s::text, %(removed)s::text[])
