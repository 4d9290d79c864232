-- Record the table [retention] of this relay's file; null: it has none. No row: the relay has no heartbeat yet.
update outbox.relay set retention = %(said)s::jsonb where id = %(relay)s::uuid
