-- One settlement of a replay: rows and positions behind their fence, then records of attempts, under the name of the target.
-- False: the fence failed and no change was made.
with settled as materialized (
    select outbox_internal.settle_replayed(
        %(replay)s::bigint, %(owner)s::uuid,
        %(shards)s::smallint[], %(epochs)s::bigint[], %(lasts)s::bigint[], %(seen)s::bigint,
        %(passed_ids)s::bigint[], %(passed_reasons)s::text[],
        %(row_id)s::bigint[], %(row_state)s::text[], %(row_ordered)s::boolean[], %(row_due_in)s::double precision[],
        %(row_attempts)s::integer[], %(row_claims)s::integer[], %(row_lease)s::uuid[], %(row_lease_for)s::double precision[],
        %(row_error)s::text[], %(row_status)s::integer[], %(row_last_attempt)s::text[],
        %(fence_shards)s::smallint[], %(fence_epochs)s::bigint[]) as mine
     where outbox_internal.only_at(%(server)s::text)
), recorded as materialized (
    select outbox_internal.record_attempts(
               '~' || %(replay)s::bigint, %(relay)s::text, %(record_id)s::bigint[], %(record_uid)s::text[]::uuid[],
               %(record_number)s::integer[], %(record_outcome)s::text[], %(record_age)s::double precision[],
               %(record_milliseconds)s::double precision[], %(record_status)s::integer[], %(record_error)s::text[],
               %(record_detail)s::text[])
      from settled s
     where s.mine and cardinality(%(record_id)s::bigint[]) > 0
)
select s.mine from settled s left join recorded on true  -- which records them
