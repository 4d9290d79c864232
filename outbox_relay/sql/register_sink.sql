-- The generation under which this relay serves the sink; made known, or given other patterns, where needed.
select outbox.register_sink(%(sink)s::text, %(patterns)s::text[], %(start)s::text,
                            %(seq)s::bigint, %(snapshot)s::pg_snapshot, %(next)s::bigint)
