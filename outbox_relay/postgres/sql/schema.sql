-- The version of the schema, and the oldest schema version whose relays work on it.
select schema_version, min_relay from outbox.meta
