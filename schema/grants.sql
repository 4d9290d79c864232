-- Grants every role of outbox.grantee what it needs on the schema as it now is, and PUBLIC nothing. `migrate` runs it
-- after every migration; it can be run again at any time.
--
-- An application (kind `emit`) may call the two functions and nothing else. A relay may read everything, write its
-- positions and exceptions, and never change the log. UPDATE of any column is what row locks ask for.
do $grants$
declare
    grantee record;
    what text;
    setting text[];
begin
    revoke all on schema outbox from public;
    revoke all on all tables in schema outbox from public;
    revoke all on all sequences in schema outbox from public;
    revoke all on all functions in schema outbox from public;
    delete from outbox.grantee g where not exists (select from pg_roles r where r.rolname = g.role_name);

    for grantee in select g.role_name, g.kind from outbox.grantee g order by g.kind, g.role_name loop
        execute format('grant usage on schema outbox to %I', grantee.role_name);
        if grantee.kind = 'emit' then
            execute format('grant execute on function outbox.emit, outbox.emit_raw to %I', grantee.role_name);
            continue;
        end if;
        execute format('grant select on all tables in schema outbox to %I', grantee.role_name);
        execute format('grant select on sequence outbox.event_id_seq, outbox.server_mark to %I', grantee.role_name);
        foreach what in array array[
            'insert, update on outbox.sink',
            'insert, update (owner, epoch, lease_until, crashes) on outbox.shard',
            'insert, delete on outbox.progress',
            'insert, update, delete on outbox.delivery',
            'insert, update, delete on outbox.relay',
            'delete on outbox.uid'
        ] loop
            execute format('grant %s to %I', what, grantee.role_name);
        end loop;
        for what in
            select p.oid::regprocedure from pg_proc p
             where p.pronamespace = 'outbox'::regnamespace and p.proname not in ('emit', 'emit_raw', 'rebase')
               and p.proname !~ 'debezium'
        loop
            execute format('grant execute on function %s to %I', what, grantee.role_name);
        end loop;

        -- Bounds for a relay that vanishes, on a role that is a relay's alone. Not everybody may set them, and what
        -- somebody else has set stays.
        continue when grantee.role_name = current_user
            or exists (select from outbox.grantee g where g.role_name = grantee.role_name and g.kind = 'emit')
            or (select r.rolsuper from pg_roles r where r.rolname = grantee.role_name);
        foreach setting slice 1 in array array[
            ['idle_in_transaction_session_timeout', '10s'], ['statement_timeout', '30s'], ['lock_timeout', '5s']
        ] loop
            continue when exists (
                select from pg_db_role_setting s cross join unnest(s.setconfig) c
                 where s.setrole = (select r.oid from pg_roles r where r.rolname = grantee.role_name)
                   and s.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
                   and starts_with(c, setting[1] || '=')
            );
            begin
                execute format('alter role %I in database %I set %I = %L',
                               grantee.role_name, current_database(), setting[1], setting[2]);
            exception when insufficient_privilege then
                raise notice 'no right to set % of role %: let an administrator set it to %',
                    setting[1], grantee.role_name, setting[2];
            end;
        end loop;
    end loop;
end
$grants$;
