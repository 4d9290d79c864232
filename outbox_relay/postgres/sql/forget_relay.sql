-- Delete the heartbeat of a relay that stops. A session that a loop has left behind ends by itself: its client may still send.
delete from outbox.relay where id = %(id)s::uuid
