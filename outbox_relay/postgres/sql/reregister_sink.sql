-- Register a sink again with its own patterns, and return its generation. This needs the same patterns in force, or
-- those of the generation that the relay knows. No row means other patterns, or no such sink.
select generation
  from outbox_internal.register_sinks(%(wanted)s::jsonb, %(seq)s::bigint, %(snapshot)s::pg_snapshot, %(next)s::bigint,
                             %(only_from)s::bigint)
 where outbox_internal.only_at(%(server)s::text) and patterns = %(patterns)s::text[]
