-- The deliveries that a filter means, newest event first.
select f.id, f.uid, f.sink, f.type, f.key, f.state, f.attempts, f.error, f.status, f.since, f.due_at,
       outbox_internal.loadable_time(d.last_attempt_at) as last_attempt_at
  from outbox.deliveries(%(filter)s::jsonb, %(most)s::integer, %(before_id)s::bigint, %(before_sink)s::text) f
  left join outbox.delivery d on d.id = f.id and d.sink = f.sink
 order by f.id desc, f.sink desc
