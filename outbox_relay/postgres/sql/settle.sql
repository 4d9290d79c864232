-- One settlement: rows behind their fence, then positions, then records of attempts. False: the fence failed and no change
-- was made.
with settled as materialized (
    select outbox_internal.settle(
        %(sink)s::text, %(owner)s::uuid,
        %(shards)s::smallint[], %(epochs)s::bigint[], %(places)s::integer[],
        %(a_seqs)s::bigint[], %(a_snapshots)s::text[]::pg_snapshot[], %(a_nexts)s::bigint[],
        %(b_seqs)s::bigint[], %(b_snapshots)s::text[]::pg_snapshot[], %(b_nexts)s::bigint[], %(lasts)s::bigint[],
        %(ids)s::bigint[], %(states)s::text[], %(ordereds)s::boolean[], %(due_in)s::double precision[],
        %(attempts)s::integer[], %(claims)s::integer[], %(leases)s::uuid[], %(lease_for)s::double precision[],
        %(errors)s::text[], %(statuses)s::integer[], %(last_attempts)s::text[],
        %(fence_shards)s::smallint[], %(fence_epochs)s::bigint[]) as mine
     where outbox_internal.only_at(%(server)s::text)
), recorded as materialized (
    select outbox_internal.record_attempts(
               %(sink)s::text, %(relay)s::text, %(record_ids)s::bigint[], %(record_uids)s::text[]::uuid[],
               %(record_numbers)s::integer[], %(record_outcomes)s::text[], %(record_ages)s::double precision[],
               %(record_milliseconds)s::double precision[], %(record_statuses)s::integer[], %(record_errors)s::text[],
               %(record_details)s::text[])
      from settled s
     where s.mine and cardinality(%(record_ids)s::bigint[]) > 0
)
select s.mine from settled s left join recorded on true  -- which records them
