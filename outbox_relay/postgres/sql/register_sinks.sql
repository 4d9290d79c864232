-- Register sinks or change their patterns where needed, and return the generations under which this relay serves them. Its
-- limits of these sinks are in force from now on, but not those of a sink that it cannot serve, whose generation is 0.
select r.name, r.generation
  from outbox.register_sinks(%(wanted)s::jsonb, %(seq)s::bigint, %(snapshot)s::pg_snapshot, %(next)s::bigint) r
 cross join lateral outbox.state_limits(case when r.generation > 0 then r.name end, %(wanted)s::jsonb)
 where outbox.only_at(%(server)s::text)
