-- Start a replay.
select id, paused from outbox.start_replay(%(filter)s::jsonb, %(to)s, %(rate)s::integer, %(actor)s, %(reason)s)
