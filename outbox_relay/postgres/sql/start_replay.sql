-- Start a replay.
select id, paused
  from outbox.start_replay(%(filter)s::jsonb, %(to)s, %(rate)s::integer, %(seq)s::bigint, %(snapshot)s::pg_snapshot,
                           %(next_xid)s::bigint, %(incarnation)s, %(generations)s::bigint, %(actor)s, %(reason)s)
