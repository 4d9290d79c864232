-- Register sinks or change their patterns where needed, and return the generations under which this relay serves them. Its
-- limits of these sinks are in force from now on.
select r.name, r.generation
  from outbox.register_sinks(%(wanted)s::jsonb, %(seq)s::bigint, %(snapshot)s::pg_snapshot, %(next)s::bigint) r
 cross join lateral outbox.state_limits(r.name, %(wanted)s::jsonb)
 where outbox.only_at(%(server)s::text)
