-- The key under which the secrets of recorded settings are hashed.
select config_key from outbox.secret
