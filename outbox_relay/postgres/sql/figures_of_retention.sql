-- The number of days that are past keep_days and still hold events.
select count(*)::bigint as days
  from jsonb_array_elements(outbox.retention_status(false) -> 'days') d where (d ->> 'due')::boolean
