-- One step of a retry: see outbox.retry_deliveries.
select audit_id, done, under_way, unsettled, next_id, next_sink, is_full, due_mark
  from outbox.retry_deliveries(
    %(filter)s::jsonb, after_id => %(after_id)s::bigint, after_sink => %(after_sink)s::text, most => %(most)s::integer,
    most_done => %(most_done)s::integer, actor => %(actor)s::text, reason => %(reason)s::text,
    audit_id => %(audit_id)s::bigint)
