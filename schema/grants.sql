-- Gives every role of outbox.grantee what its kind needs on the schema as it now is, and takes everything else from
-- every role but the owner. `migrate` runs it each time; it can be run again at any time.
--
-- An application (kind `emit`) may call seven functions and nothing else, and a consumer (kind `consume`) one. A relay may
-- read everything, write its positions and exceptions, and never change the log. UPDATE of any column is what row locks ask
-- for. Every other action is a function that an operator's role may call.


do $grants$
declare
    schema_owner constant name := (select r.rolname from pg_namespace n join pg_roles r on r.oid = n.nspowner
                                    where n.nspname = 'outbox');
    item record;
begin
    -- A migration that another role applied made what the owner's functions could not use.
    for item in
        select case when c.relkind = 'S' then 'sequence' when c.relkind = 'v' then 'view' else 'table' end as kind,
               c.oid::regclass::text as name
          from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'outbox' and c.relowner <> n.nspowner and c.relkind in ('r', 'p', 'v', 'S')
           -- A sequence of a column follows its table. Partitions depend on theirs too, and do not.
           and not (c.relkind = 'S' and exists (
                    select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid
                                              and d.refclassid = 'pg_class'::regclass and d.deptype in ('a', 'i')))
        union all
        select 'type', c.reltype::regtype::text
          from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where n.nspname = 'outbox' and c.relowner <> n.nspowner and c.relkind = 'c'
        union all
        select 'function', p.oid::regprocedure::text
          from pg_proc p join pg_namespace n on n.oid = p.pronamespace
         where n.nspname in ('outbox', 'outbox_internal') and p.proowner <> n.nspowner
    loop
        execute format('alter %s %s owner to %I', item.kind, item.name, schema_owner);
    end loop;

    delete from outbox.grantee g where not exists (select from pg_roles r where r.rolname = g.role_name);

    -- New functions belong to PUBLIC too, and the rights of a relay differ between versions: neither is reported.
    for item in
        select coalesce('role "' || f.role_name || '"', 'PUBLIC') as role, f.object_type, f.privileges,
               string_agg(f.name, ', ' order by f.name) as names
          from (
            select p.role_name, p.object_type, p.name,
                   string_agg(distinct p.privilege || coalesce(' (' || p.column_name || ')', ''), ', ') as privileges
              from outbox.foreign_privilege p
             where not (p.role_name is null and p.object_type = 'function' and exists (
                        select from pg_proc f where f.oid = p.object
                                               and f.xmin = pg_current_xact_id()::xid))
               and not exists (select from outbox.grantee g where g.role_name = p.role_name and g.kind = 'relay')
             group by p.role_name, p.object_type, p.name
          ) f
         group by f.role_name, f.object_type, f.privileges
         order by 1, 2, 3
    loop
        raise notice 'taken back from %: % on % %', item.role, item.privileges, item.object_type, item.names;
    end loop;
    for item in
        select d.owner_name, coalesce('role "' || d.role_name || '"', 'PUBLIC') as role, d.object_type,
               string_agg(d.privilege, ', ' order by d.privilege) as privileges
          from outbox.foreign_default_privilege d
         group by d.owner_name, d.role_name, d.object_type
         order by 2, 3
    loop
        raise notice 'default privileges of role "%" give % % on each new %: outbox-relay takes that back from what it makes',
            item.owner_name, item.role, item.privileges, item.object_type;
    end loop;

    for item in
        select f.object_type, f.privilege || coalesce(' (' || quote_ident(f.column_name) || ')', '') as privilege,
               case f.object_type when 'schema' then f.name when 'function' then f.object::regprocedure::text
                                  else format('outbox.%I', f.name) end as name,
               case when f.role_name is null then 'public' else quote_ident(f.role_name) end as role
          from outbox.foreign_privilege f
    loop
        execute format('revoke %s on %s %s from %s cascade', item.privilege, item.object_type, item.name, item.role);
    end loop;
    for item in
        select g.role_name, p.object_type, p.privilege || coalesce(' (' || array_to_string(p.columns, ', ') || ')', '')
                   as privilege,
               case p.object_type when 'schema' then p.name
                                  when 'function' then f.oid::regprocedure::text
                                  else format('outbox.%I', p.name) end as name
          from outbox.grantee g
          join outbox.privilege p on p.kind = g.kind
          left join pg_proc f on p.object_type = 'function' and f.pronamespace = any ('{outbox, outbox_internal}'::regnamespace[])
                             and f.proname = p.name
         where g.role_name <> schema_owner
           and case p.object_type when 'schema' then true when 'function' then f.oid is not null
                                  else to_regclass(format('outbox.%I', p.name)) is not null end
    loop
        execute format('grant %s on %s %s to %I', item.privilege, item.object_type, item.name, item.role_name);
    end loop;
end
$grants$;

-- The settings of a relay's session, for relays behind a pooler, which can set nothing themselves: the defaults of a
-- role that is a relay's alone. A timeout that was set by hand is kept.
do $settings$
declare
    wanted constant text[] := array[
        ['TimeZone', 'UTC'], ['DateStyle', 'ISO'], ['IntervalStyle', 'postgres'], ['client_encoding', 'UTF8'],
        ['bytea_output', 'hex'], ['array_nulls', 'on'], ['standard_conforming_strings', 'on'],
        ['extra_float_digits', '1'], ['search_path', 'pg_catalog'], ['row_security', 'off'],
        ['default_transaction_isolation', 'read committed'], ['default_transaction_read_only', 'off'],
        ['default_transaction_deferrable', 'off'],
        ['statement_timeout', '9s'], ['lock_timeout', '5s'], ['idle_in_transaction_session_timeout', '10s'],
        ['idle_session_timeout', '0'], ['transaction_timeout', '0'],
        ['jit', 'off'], ['plan_cache_mode', 'auto'], ['enable_seqscan', 'on'], ['enable_indexscan', 'on'],
        ['enable_indexonlyscan', 'on'], ['enable_bitmapscan', 'on'], ['enable_sort', 'on'], ['enable_nestloop', 'on'],
        ['enable_hashjoin', 'on'], ['enable_mergejoin', 'on'],
        ['restrict_nonsystem_relation_kind', ''], ['session_replication_role', 'origin']
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
