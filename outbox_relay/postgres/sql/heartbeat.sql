-- Record that this relay is alive and serves these sinks, and return whether its settings are not recorded.
insert into outbox.relay (id, name, version, sinks)
values (%(id)s::uuid, %(name)s, %(version)s, %(sinks)s::text[])
on conflict (id) do update set sinks = excluded.sinks, seen_at = clock_timestamp()
returning config is null
