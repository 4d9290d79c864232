-- One step of a discard: see outbox.discard_deliveries.
select audit_id, done, under_way, unsettled, next_id, next_sink, unsettled_uids
  from outbox.discard_deliveries(
    %(filter)s::jsonb, after_id => %(after_id)s::bigint, after_sink => %(after_sink)s::text, most => %(most)s::integer,
    among => %(among)s::uuid[], actor => %(actor)s::text, reason => %(reason)s::text, audit_id => %(audit_id)s::bigint)
