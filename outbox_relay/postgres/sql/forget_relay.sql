-- Delete the heartbeat of a relay that stops.
delete from outbox.relay where id = %(id)s::uuid
