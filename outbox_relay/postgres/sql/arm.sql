-- Mark the server unless it is marked: see the schema.
select outbox_internal.arm()
