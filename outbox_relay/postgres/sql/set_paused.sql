-- Pause or resume a sink, which relays check once a second; whether that changed it.
select outbox.set_paused(%(sink)s::text, %(paused)s::boolean, %(actor)s::text, %(reason)s::text) as changed
