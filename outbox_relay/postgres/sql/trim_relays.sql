-- Delete the heartbeats of relays that were last seen more than an hour ago.
delete from outbox.relay where seen_at < clock_timestamp() - interval '1 hour'
