-- Register those of the sinks that are missing, and return the generations under which this relay serves them.
select name, generation
  from outbox_internal.register_sinks(%(wanted)s::jsonb, %(seq)s::bigint, %(snapshot)s::pg_snapshot, %(next)s::bigint,
                             only_missing => true)
 where outbox_internal.only_at(%(server)s::text)
