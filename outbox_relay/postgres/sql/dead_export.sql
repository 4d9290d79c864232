-- The next deliveries that a filter means, with their events: up to `most`, or about `most_bytes` of payload and headers.
select e.id, e.uid, e.sink, e.type, e.key, e.state, e.attempts, e.error, e.status, e.since, e.created_at, e.content_type,
       e.deliver_at, e.headers, e.payload
  from (
    select f.id, f.uid, f.sink, f.type, f.key, f.state, f.attempts, f.error, f.status, f.since, f.created_at,
           d.content_type, outbox_internal.loadable_time(d.deliver_at) as deliver_at, d.headers, d.payload,
           sum(coalesce(octet_length(d.payload), 0) + coalesce(pg_column_size(d.headers), 0))
               over (order by f.id desc, f.sink desc rows between unbounded preceding and 1 preceding) as before
      from outbox.deliveries(%(filter)s::jsonb, %(most)s::integer, %(before_id)s::bigint, %(before_sink)s::text) f
      join outbox.delivery d on d.id = f.id and d.sink = f.sink
  ) e
 where e.before < %(most_bytes)s::bigint or e.before is null
 order by e.id desc, e.sink desc
