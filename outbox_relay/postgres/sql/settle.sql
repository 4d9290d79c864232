-- One settlement: rows behind their fence, then positions, then records of attempts. False: the fence failed and no change
-- was made.
with settled as materialized (
    select outbox_internal.settle(
        %(sink)s::text, %(owner)s::uuid,
        %(shards)s::smallint[], %(epochs)s::bigint[], %(places)s::integer[],
        %(position_a_seq)s::bigint[], %(position_a_snapshot)s::text[]::pg_snapshot[], %(position_a_next)s::bigint[],
        %(position_b_seq)s::bigint[], %(position_b_snapshot)s::text[]::pg_snapshot[], %(position_b_next)s::bigint[], %(position_last)s::bigint[],
        %(row_id)s::bigint[], %(row_state)s::text[], %(row_ordered)s::boolean[], %(row_due_in)s::double precision[],
        %(row_attempts)s::integer[], %(row_claims)s::integer[], %(row_lease)s::uuid[], %(row_lease_for)s::double precision[],
        %(row_error)s::text[], %(row_status)s::integer[], %(row_last_attempt)s::text[],
        %(fence_shards)s::smallint[], %(fence_epochs)s::bigint[]) as mine
     where outbox_internal.only_at(%(server)s::text)
), recorded as materialized (
    select outbox_internal.record_attempts(
               %(sink)s::text, %(relay)s::text, %(record_id)s::bigint[], %(record_uid)s::text[]::uuid[],
               %(record_number)s::integer[], %(record_outcome)s::text[], %(record_age)s::double precision[],
               %(record_milliseconds)s::double precision[], %(record_status)s::integer[], %(record_error)s::text[],
               %(record_detail)s::text[])
      from settled s
     where s.mine and cardinality(%(record_id)s::bigint[]) > 0
)
select s.mine from settled s left join recorded on true  -- which records them
