-- Record an archive that was read back and verified.
select outbox_internal.record_archive(
    %(day)s::date, %(lease)s::bigint, %(address)s::text, %(hash)s::text, %(events)s::bigint
)
