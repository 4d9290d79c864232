-- Remove old uids among the next ones.
select * from outbox.trim_uids(%(lease)s::bigint, %(most)s::integer)
