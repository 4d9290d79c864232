-- The settings of a relay's session, for relays behind a pooler, which can set nothing themselves: `migrate
-- --role-settings` makes them the defaults of each role that is a relay's alone. A timeout that was set by hand is kept.
do $settings$
declare
    wanted constant text[] := array[
        ['TimeZone', 'UTC'], ['DateStyle', 'ISO'], ['client_encoding', 'UTF8'], ['search_path', 'pg_catalog'],
        ['row_security', 'off'],
        ['default_transaction_isolation', 'read committed'], ['default_transaction_read_only', 'off'],
        ['statement_timeout', '9s'], ['lock_timeout', '5s'], ['idle_in_transaction_session_timeout', '10s'],
        ['idle_session_timeout', '0'], ['transaction_timeout', '0'],
        ['jit', 'off'], ['session_replication_role', 'origin']
    ];
    bounds constant text[] := '{statement_timeout, lock_timeout, idle_in_transaction_session_timeout}';
    relay record;
    missing record;
begin
    for relay in
        select g.role_name, r.oid from outbox.grantee g join pg_roles r on r.rolname = g.role_name
         where g.kind = 'relay' and not r.rolsuper and g.role_name <> current_user
           and not exists (select from outbox.grantee o where o.role_name = g.role_name and o.kind <> 'relay')
         order by 1
    loop
        select array_agg(array[w.name, w.value]) as settings, string_agg(w.name || ' = ' || quote_literal(w.value), ', ')
                   as shown,
               string_agg(w.name || ' = ' || quote_literal(h.value), ', ') filter (where h.value <> w.value) as before
          into missing
          from (select wanted[n][1] as name, wanted[n][2] as value from generate_subscripts(wanted, 1) n) w
          join pg_settings known on known.name = w.name
          left join lateral (
            select substr(c, length(w.name) + 2) as value, s.setrole <> 0 as is_roles,
                   s.setrole <> 0 and s.setdatabase <> 0 as is_ours
              from pg_db_role_setting s cross join unnest(s.setconfig) c
             where s.setrole in (0, relay.oid)
               and s.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
               and starts_with(lower(c), lower(w.name) || '=')
             order by s.setrole <> 0 and s.setdatabase <> 0 desc, s.setrole <> 0 desc, s.setdatabase <> 0 desc
             limit 1
          ) h on true
         where not coalesce(h.is_ours and h.value = w.value or h.is_roles and w.name = any (bounds), false)
           -- Only superusers may set it, so it is set only if another value is stored.
           and (w.name <> 'session_replication_role' or h.value <> w.value);
        continue when missing.settings is null;
        begin
            for n in 1..array_length(missing.settings, 1) loop
                execute format('alter role %I in database %I set %s = %L', relay.role_name, current_database(),
                               missing.settings[n][1], missing.settings[n][2]);
            end loop;
            if missing.before is not null then
                raise notice 'set for role "%" in this database, where something else stood before (%): %',
                    relay.role_name, missing.before, missing.shown;
            end if;
        exception when insufficient_privilege then
            raise notice 'no right to set defaults of role "%" in this database: let an administrator set them: %',
                relay.role_name, missing.shown;
        end;
    end loop;
end
$settings$;
