-- Gives every role of outbox.grantee what its kind needs on the schema as it now is. `migrate` runs it each time; it can
-- be run again at any time. What other roles can do with objects made by this run, and PUBLIC with new functions, is taken
-- back. Other privileges that the schema did not give are named; they are revoked if outbox.revoke_others is on.
do $grants$
declare
    schema_owner constant name := (select r.rolname from pg_namespace n join pg_roles r on r.oid = n.nspowner
                                    where n.nspname = 'outbox');
    revoke_others constant boolean := coalesce(current_setting('outbox.revoke_others', true) = 'on', false);
    -- A script that runs this alone has made nothing.
    there_before constant text[] := nullif(current_setting('outbox.there_before', true), '');
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

    -- Default privileges, the server's own among them, gave these.
    for item in
        select f.privilege, f.object_type, coalesce(quote_ident(f.role_name), 'public') as role,
               case f.object_type when 'schema' then quote_ident(f.name) when 'function' then f.object::regprocedure::text
                                  else f.object::regclass::text end as name
          from outbox.foreign_privilege f
         where f.object_type || ' ' || f.object <> all (there_before)
    loop
        execute format('revoke %s on %s %s from %s', item.privilege, item.object_type, item.name, item.role);
    end loop;

    for item in
        select coalesce('role "' || f.role_name || '"', 'PUBLIC') as role, f.object_type, f.privileges,
               string_agg(f.name, ', ' order by f.name) as names
          from (
            select p.role_name, p.object_type, p.name,
                   string_agg(distinct p.privilege || coalesce(' (' || p.column_name || ')', ''), ', ') as privileges
              from outbox.foreign_privilege p
             group by p.role_name, p.object_type, p.name
          ) f
         group by f.role_name, f.object_type, f.privileges
         order by 1, 2, 3
    loop
        if revoke_others then
            raise notice 'revoked from %: % on % %', item.role, item.privileges, item.object_type, item.names;
        else
            raise notice '% has % on % %: outbox-relay migrate --revoke-others revokes it', item.role, item.privileges,
                item.object_type, item.names;
        end if;
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
               case f.object_type when 'schema' then quote_ident(f.name) when 'function' then f.object::regprocedure::text
                                  else f.object::regclass::text end as name,
               coalesce(quote_ident(f.role_name), 'public') as role
          from outbox.foreign_privilege f
         where revoke_others
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
