-- Discard old dead rows among the next ones.
select removed, left_over from outbox_internal.discard_expired(%(lease)s::bigint, %(most)s::integer)
