-- The key under which the secrets of recorded settings are hashed.
select key from outbox.config_key
