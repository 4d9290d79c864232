-- A log that is moved without its own row of outbox.meta names the cluster that it comes from, and roles that are renamed
-- keep their grants and their uids. Relays made for version 2 work on this schema.

-- ---------------------------------------------------------------------------------------------------------
-- The cluster of a sink's positions
-- ---------------------------------------------------------------------------------------------------------

-- The identifier of this cluster, with the owner's rights: some servers let no other role ask for it.
create function outbox.home() returns bigint
language sql stable security definer
set search_path = pg_catalog, pg_temp
return (select c.system_identifier from pg_control_system() c);

-- The cluster that the positions of a sink belong to goes wherever they go: outbox.meta stays behind if only data is
-- copied into a schema that `migrate` has made, as by pg_dump --data-only or logical replication.
alter table outbox.sink add column home bigint;
update outbox.sink set home = (select m.system_identifier from outbox.meta m);
alter table outbox.sink alter column home set default outbox.home();
comment on column outbox.sink.home is 'The identifier of the cluster that the positions of this sink belong to.';

-- A sink of another cluster makes the log one of another cluster: every tick is refused until the rebase.
create function outbox.find_foreign_sink() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update outbox.meta set system_identifier = 0;
    return null;
end
$$;
create trigger foreign_sink after insert on outbox.sink
    for each row when (new.home is distinct from outbox.home()) execute function outbox.find_foreign_sink();
alter table outbox.sink enable always trigger foreign_sink;

-- A rebase names this cluster, and so for every sink.
create function outbox.bring_sinks_home() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update outbox.sink s set home = new.system_identifier where s.home is distinct from new.system_identifier;
    return null;
end
$$;
create trigger sinks_come_home after update of system_identifier on outbox.meta
    for each row when (new.system_identifier = outbox.home()) execute function outbox.bring_sinks_home();
alter table outbox.meta enable always trigger sinks_come_home;

-- ---------------------------------------------------------------------------------------------------------
-- Roles that are renamed
-- ---------------------------------------------------------------------------------------------------------

alter table outbox.grantee add column role_oid oid, add column home bigint;
comment on column outbox.grantee.role_oid is 'The role in the cluster `home`, whatever it is renamed to there.';

-- Let a role that was renamed in this cluster keep its grants, and remember the roles of all names. A name that a role
-- has counts more than the number.
create function outbox.follow_renamed_roles() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    update outbox.grantee g
       set role_name = r.rolname
      from pg_roles r
     where r.oid = g.role_oid and g.home = outbox.home() and r.rolname <> g.role_name
       and not exists (select from pg_roles o where o.rolname = g.role_name)
       and not exists (select from outbox.grantee o where o.role_name = r.rolname and o.kind = g.kind);
    update outbox.grantee g
       set role_oid = r.oid, home = outbox.home()
      from pg_roles r
     where r.rolname = g.role_name and (g.role_oid is distinct from r.oid or g.home is distinct from outbox.home());
end
$$;

alter table outbox.uid add column emitter_oid oid;
comment on column outbox.uid.emitter_oid is 'The role that used the uid, whatever it is renamed to in this cluster.';

-- As in version 2, but a role that was renamed is still the one that used its uids. Only an old name that no role has now
-- is doubted: elsewhere, as after a restore, the number may be that of another role.
create or replace function outbox.claim_uid(claimed uuid, claimant text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
as $$
declare
    own constant oid := (select r.oid from pg_roles r where r.rolname = claimant);
    other text;
    others oid;
    made_at timestamptz;
    earliest timestamptz;
    latest timestamptz;
    is_new boolean;
begin
    -- A row that was there may be deleted before it is read.
    for attempt in 1..3 loop
        insert into outbox.uid (uid, emitter, emitter_oid) values (claimed, claimant, own) on conflict do nothing;
        is_new := found;
        exit when is_new;
        select u.emitter, u.emitter_oid into other, others from outbox.uid u where u.uid = claimed;
        exit when found;
        if attempt = 3 then
            raise exception using errcode = 'serialization_failure',
                message = format('uid %s was removed while it was looked at: try again', claimed);
        end if;
    end loop;
    if is_new and get_byte(uuid_send(claimed), 6) >> 4 = 7 then
        made_at := to_timestamp(('x' || encode(substring(uuid_send(claimed) from 1 for 6), 'hex'))::bit(48)::bigint / 1000.0);
        earliest := made_at - interval '10 minutes';
        latest := made_at + interval '10 minutes';
        select e.emitter into other
          from outbox.event e
         where e.uid = claimed and e.emitter <> claimant and e.created_at >= earliest and e.created_at <= latest
         limit 1;
    end if;
    if other <> claimant and not (others = own and not exists (select from pg_roles r where r.rolname = other)) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format(
                'outbox.emit: %suid %s was emitted by role "%s", and this is role "%s": a uid belongs to the role that '
                'used it first',
                coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', ''),
                claimed, other, claimant);
    end if;
    return is_new;
end
$$;
