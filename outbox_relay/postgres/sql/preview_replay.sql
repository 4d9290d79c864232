-- The events that a replay would deliver.
select matched, exact, unknown, oldest, paused, relays
  from outbox.preview_replay(%(filter)s::jsonb, %(to)s, %(most)s::integer, %(seconds)s::double precision,
                             %(alive)s::double precision)
