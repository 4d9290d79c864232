-- The deliveries that a filter means, newest event first.
select id, uid, sink, type, key, state, attempts, error, status, since, due_at
  from outbox.deliveries(%(filter)s::jsonb, %(most)s::integer, %(before_id)s::bigint, %(before_sink)s::text)
