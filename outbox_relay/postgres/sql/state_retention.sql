-- Record the table [retention] of this relay's file. False means that the relay has no heartbeat yet.
select outbox_internal.state_retention(%(relay)s::uuid, %(said)s::jsonb)
