-- One settlement of a replay: rows and positions behind their fence, then records of attempts, under the name of the target.
-- False: the fence failed and no change was made.
with settled as materialized (
    select outbox_internal.settle_replayed(
        %(replay)s::bigint, %(owner)s::uuid,
        %(shards)s::smallint[], %(epochs)s::bigint[], %(lasts)s::bigint[], %(seen)s::bigint,
        %(passed_ids)s::bigint[], %(passed_reasons)s::text[],
        %(ids)s::bigint[], %(states)s::text[], %(ordereds)s::boolean[], %(due_in)s::double precision[],
        %(attempts)s::integer[], %(claims)s::integer[], %(leases)s::uuid[], %(lease_for)s::double precision[],
        %(errors)s::text[], %(statuses)s::integer[], %(last_attempts)s::text[],
        %(fence_shards)s::smallint[], %(fence_epochs)s::bigint[]) as mine
     where outbox_internal.only_at(%(server)s::text)
), recorded as materialized (
    select outbox_internal.record_attempts(
               '~' || %(replay)s::bigint, %(relay)s::text, %(record_ids)s::bigint[], %(record_uids)s::text[]::uuid[],
               %(record_numbers)s::integer[], %(record_outcomes)s::text[], %(record_ages)s::double precision[],
               %(record_milliseconds)s::double precision[], %(record_statuses)s::integer[], %(record_errors)s::text[],
               %(record_details)s::text[])
      from settled s
     where s.mine and cardinality(%(record_ids)s::bigint[]) > 0
)
select s.mine from settled s left join recorded on true  -- which records them
