-- The generations under which this relay serves its sinks; made known, or given other patterns, where needed.
select name, generation
  from outbox.register_sinks(%(wanted)s::jsonb, %(seq)s::bigint, %(snapshot)s::pg_snapshot, %(next)s::bigint)
 where outbox.only_at(%(server)s::text)
