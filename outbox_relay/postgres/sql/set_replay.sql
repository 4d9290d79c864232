-- Pause, resume or cancel a replay.
select outbox.set_replay(%(replay)s::bigint, %(action)s, %(actor)s, %(reason)s) as changed
