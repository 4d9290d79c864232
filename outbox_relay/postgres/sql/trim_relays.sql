-- Delete the heartbeats of relays that were last seen more than an hour ago, or while the clock was ahead. A relay that lives
-- makes its own again.
delete from outbox.relay
 where seen_at < clock_timestamp() - interval '1 hour' or seen_at > clock_timestamp() + interval '1 minute'
