-- Delete delivered rows if their leases are still valid, and record their deliveries: with `only_tried`, those of events
-- that were tried before, also before a retry by an operator, after which attempts are counted from 1 again. `followed`
-- are those of whose key a row is left to be delivered.
with deleted as (
    delete from outbox.delivery d
     using unnest(%(row_id)s::bigint[], %(row_lease)s::uuid[], %(record_number)s::integer[], %(record_outcome)s::text[],
                  %(record_age)s::double precision[], %(record_milliseconds)s::double precision[],
                  %(record_status)s::integer[], %(record_error)s::text[], %(record_detail)s::text[])
           r (id, lease, number, outcome, age, milliseconds, status, error, detail)
     where d.sink = %(sink)s::text and d.id = any (%(row_id)s::bigint[]) and d.id = r.id and d.lease = r.lease
    returning d.id, d.uid, d.last_attempt_at, d.ordered, d.key, r.number, r.outcome, r.age, r.milliseconds, r.status,
              r.error, r.detail
), recorded as materialized (
    select outbox_internal.record_attempts(
               %(sink)s::text, %(relay)s::text, array_agg(r.id), array_agg(r.uid), array_agg(r.number),
               array_agg(r.outcome), array_agg(r.age), array_agg(r.milliseconds), array_agg(r.status),
               array_agg(r.error), array_agg(r.detail)) as attempts
      from deleted r
     where r.outcome is not null and (not %(only_tried)s or r.last_attempt_at is not null)
    having count(*) > 0
)
select r.id, k.key is not null as followed
  from deleted r
  left join recorded on true  -- which records them
  left join outbox_internal.keys_with_rows(
                %(sink)s::text, (select array_agg(distinct o.key) from deleted o where o.ordered)) k
         on k.key = r.key and r.ordered
