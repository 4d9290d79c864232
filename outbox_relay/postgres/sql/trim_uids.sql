-- Remove old uids among the next ones.
select * from outbox_internal.trim_uids(%(lease)s::bigint, %(most)s::integer)
