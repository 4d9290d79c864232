-- The settings that the live relays have recorded.
select name, version, config from outbox_internal.relay_configs(%(seconds)s::double precision)
