-- The largest payload in bytes that an event may have here. The setting outbox.max_payload_bytes only lowers it.
select outbox.payload_ceiling() as bytes
