-- One settlement: rows behind their fence, then positions. False: the fence failed and no change was made.
select outbox.settle(
    %(sink)s::text, %(owner)s::uuid,
    %(shards)s::smallint[], %(epochs)s::bigint[], %(places)s::integer[],
    %(a_seqs)s::bigint[], %(a_snapshots)s::text[]::pg_snapshot[], %(a_nexts)s::bigint[],
    %(b_seqs)s::bigint[], %(b_snapshots)s::text[]::pg_snapshot[], %(b_nexts)s::bigint[], %(lasts)s::bigint[],
    %(ids)s::bigint[], %(states)s::text[], %(ordereds)s::boolean[], %(due_in)s::double precision[],
    %(attempts)s::integer[], %(claims)s::integer[], %(leases)s::uuid[], %(lease_for)s::double precision[],
    %(errors)s::text[], %(statuses)s::integer[], %(last_attempts)s::text[],
    %(fence_shards)s::smallint[], %(fence_epochs)s::bigint[])
 where outbox.only_at(%(server)s::text)
