-- The generation under which this relay serves a sink again: with its own patterns, where those in force are the same or
-- are still of the generation that it knows. No row: they are others, or there is no such sink.
select generation
  from outbox.register_sinks(%(wanted)s::jsonb, %(seq)s::bigint, %(snapshot)s::pg_snapshot, %(next)s::bigint,
                             %(only_from)s::bigint)
 where outbox.only_at(%(server)s::text) and patterns = %(patterns)s::text[]
