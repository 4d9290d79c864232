-- Record the settings that this relay runs with.
update outbox.relay set config = %(config)s::jsonb where id = %(id)s::uuid
