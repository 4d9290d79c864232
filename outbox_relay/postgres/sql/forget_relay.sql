-- Delete the heartbeat and the sessions of a relay that stops.
with ended as (delete from outbox.session where owner = %(id)s::uuid)
delete from outbox.relay where id = %(id)s::uuid
