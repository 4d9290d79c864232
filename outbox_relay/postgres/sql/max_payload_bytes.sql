-- The largest payload of an event in bytes. The setting outbox.max_payload_bytes can only lower it.
select outbox_internal.payload_ceiling() as bytes
