-- The version of the schema, and the oldest a relay may have been made for.
select schema_version, min_relay from outbox.meta
