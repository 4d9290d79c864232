-- This relay has left.
delete from outbox.relay where id = %(id)s::uuid
