-- Put a sink at another place of the log.
select again, passed_over, exact
  from outbox.seek_sink(%(sink)s, %(to)s, %(seq)s::bigint, %(snapshot)s::pg_snapshot, %(next_xid)s::bigint,
                        %(incarnation)s, %(generations)s::bigint, %(actor)s, %(reason)s)
