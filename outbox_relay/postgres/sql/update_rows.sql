-- Update rows that were not delivered, so that they wait again or are dead, if their leases are still valid, and record
-- their attempts.
with updated as (
    update outbox.delivery d
       set state = coalesce(r.state, d.state),
           due_at = case when r.due_in is null then d.due_at else clock_timestamp() + r.due_in * interval '1 second' end,
           ready = case when d.ready is null or r.due_in is null then d.ready else r.due_in <= 0 end,
           attempts = r.attempts,
           claims = 0,
           lease = null, lease_until = null, owner = null,
           last_error = coalesce(r.error, d.last_error),
           last_status = case when r.error is null then d.last_status else r.status end,
           last_attempt_at = case when r.attempts > d.attempts or r.last_attempt is not null then clock_timestamp()
                                  else d.last_attempt_at end,
           last_attempt = case when r.attempts > d.attempts or r.last_attempt is not null then r.last_attempt::jsonb
                               else d.last_attempt end
      from unnest(%(row_id)s::bigint[], %(row_lease)s::uuid[], %(row_state)s::text[], %(row_due_in)s::double precision[],
                  %(row_attempts)s::integer[], %(row_error)s::text[], %(row_status)s::integer[], %(row_last_attempt)s::text[],
                  %(record_number)s::integer[], %(record_outcome)s::text[], %(record_age)s::double precision[],
                  %(record_milliseconds)s::double precision[], %(record_status)s::integer[],
                  %(record_error)s::text[], %(record_detail)s::text[])
           r (id, lease, state, due_in, attempts, error, status, last_attempt, number, outcome, age, milliseconds,
              attempt_status, attempt_error, detail)
     where d.sink = %(sink)s::text and d.id = any (%(row_id)s::bigint[]) and d.id = r.id and d.lease = r.lease
    returning d.id, d.uid, r.number, r.outcome, r.age, r.milliseconds, r.attempt_status, r.attempt_error, r.detail
), recorded as materialized (
    select outbox_internal.record_attempts(
               %(sink)s::text, %(relay)s::text, array_agg(r.id), array_agg(r.uid), array_agg(r.number),
               array_agg(r.outcome), array_agg(r.age), array_agg(r.milliseconds), array_agg(r.attempt_status),
               array_agg(r.attempt_error), array_agg(r.detail)) as attempts
      from updated r
     where r.outcome is not null
    having count(*) > 0
)
select r.id from updated r left join recorded on true  -- which records them
