-- Remove old marks of the inbox among the next ones.
select * from outbox_internal.trim_inbox(%(lease)s::bigint, %(most)s::integer)
