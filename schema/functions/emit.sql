-- The same for JSON. It has a body of its own: a call within the call costs the application some microseconds more.
create or replace function outbox.emit(
    type text,
    payload jsonb,
    key text default null,
    headers jsonb default null,
    deliver_at timestamptz default null,
    uid uuid default null,
    tenant text default null,
    priority integer default null,
    unique_key text default null
) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    body bytea := convert_to(payload::text, 'UTF8');
    fault text;
    chosen boolean;
    earlier uuid;
begin
    if outbox_internal.is_usual(type, body, key, headers, deliver_at, 'application/json') is not true then
        fault := outbox_internal.event_fault(type, body, key, headers, deliver_at, 'application/json',
                                    nullif(current_setting('outbox.max_payload_bytes', true), ''));
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
    end if;
    if tenant is not null or priority is not null or unique_key is not null then
        fault := outbox_internal.queue_fault(tenant, priority, unique_key);
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
        if unique_key is not null then
            chosen := uid is not null;
            uid := coalesce(uid, outbox_internal.uuid7());
            earlier := outbox_internal.claim_unique_key(type, unique_key, uid, outbox_internal.emitter(), deliver_at);
            if earlier is not null then
                return earlier;
            end if;
            if chosen and not outbox_internal.claim_uid(uid, outbox_internal.emitter()) then
                delete from outbox.unique_key k where k.type = type and k.unique_key = unique_key;
                return uid;
            end if;
            chosen := false;
        end if;
    end if;
    if uid is null then
        uid := outbox_internal.uuid7();
    elsif chosen is null then
        if not outbox_internal.claim_uid(uid, outbox_internal.emitter()) then
            return uid;
        end if;
    end if;
    insert into outbox.event (
        shard, uid, type, key, payload, content_type, headers, deliver_at, emitter, tenant, priority
    )
    values (outbox_internal.shard_of(key, uid), uid, type, key, body, 'application/json', headers, deliver_at, outbox_internal.emitter(),
            tenant, priority);
    if outbox_internal.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;
comment on function outbox.emit is
    'Emit an event with a JSON payload in the caller''s transaction, and return its uid. It is relayed if the transaction '
    'commits. Example: with o as (insert into orders … returning id) select outbox.emit(''order.created'', '
    'json_build_object(''id'', id)) from o';

-- Emits one event. `outbox.wake` is a setting for those who prepare transactions, which may not have notified anybody.
-- As in version 2. The shard is filled in here.
-- As in version 9, with three more parameters. `unique_key` is looked at before the uid is used up.
create or replace function outbox.emit_raw(
    type text,
    payload bytea,
    key text default null,
    headers jsonb default null,
    deliver_at timestamptz default null,
    uid uuid default null,
    content_type text default 'application/octet-stream',
    tenant text default null,
    priority integer default null,
    unique_key text default null
) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    fault text;
    chosen boolean;
    earlier uuid;
begin
    if outbox_internal.is_usual(type, payload, key, headers, deliver_at, content_type) is not true then
        fault := outbox_internal.event_fault(type, payload, key, headers, deliver_at, content_type,
                                    nullif(current_setting('outbox.max_payload_bytes', true), ''));
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
    end if;
    if tenant is not null or priority is not null or unique_key is not null then
        fault := outbox_internal.queue_fault(tenant, priority, unique_key);
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
        if unique_key is not null then
            chosen := uid is not null;
            uid := coalesce(uid, outbox_internal.uuid7());
            earlier := outbox_internal.claim_unique_key(type, unique_key, uid, outbox_internal.emitter(), deliver_at);
            if earlier is not null then
                return earlier;
            end if;
            if chosen and not outbox_internal.claim_uid(uid, outbox_internal.emitter()) then
                delete from outbox.unique_key k where k.type = type and k.unique_key = unique_key;
                return uid;
            end if;
            chosen := false;
        end if;
    end if;
    if uid is null then
        uid := outbox_internal.uuid7();
    elsif chosen is null then
        if not outbox_internal.claim_uid(uid, outbox_internal.emitter()) then
            return uid;
        end if;
    end if;
    insert into outbox.event (
        shard, uid, type, key, payload, content_type, headers, deliver_at, emitter, tenant, priority
    )
    values (outbox_internal.shard_of(key, uid), uid, type, key, payload, content_type, headers, deliver_at, outbox_internal.emitter(),
            tenant, priority);
    if outbox_internal.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;
comment on function outbox.emit_raw is
    'Emit an event with a payload of bytes in the caller''s transaction, and return its uid. Parameters are those of '
    'outbox.emit, and the content type of the payload.';

-- Record a uid that a caller chose. True: it is new, so its event is to be emitted. False: this role has used it
-- before, and nothing is to be emitted. A uid that another role has used is refused by name.
--
-- Uids of version 7 may be those that emit makes, which leave no row in outbox.uid: they are looked for in the log,
-- near the time that they hold. The query is planned with its values and without computing on them, which leaves out
-- all other days: no partition is locked that emptying the log might wait for.
-- As in version 2, but a role that was renamed is still the one that used its uids. Only an old name that no role has now
-- is doubted: elsewhere, as after a restore, the number may be that of another role.
create or replace function outbox_internal.claim_uid(claimed uuid, claimant text) returns boolean
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

-- The events that the calling transaction has emitted so far, in that order: those that are recorded under the caller's
-- present role, including those that triggers and SECURITY DEFINER functions emitted. An application's role may not read the
-- log, and its tests ask what the code has emitted. Needs no transaction id, and takes none.
--
-- A restored log has events with the transaction ids of another cluster, which come again here. So only events that are not
-- older than the transaction count, with a minute for a clock that was set back.
create or replace function outbox.emitted() returns table (
    uid uuid, type text, key text, payload bytea, content_type text, headers jsonb, deliver_at timestamptz
)
language plpgsql stable security definer rows 10
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select e.uid, e.type, e.key, e.payload, e.content_type, e.headers, e.deliver_at
      from outbox.event e
     where e.xid = pg_current_xact_id_if_assigned() and e.emitter = outbox_internal.emitter()
       and e.created_at >= now() - interval '1 minute'
     order by e.id;
end
$$;
comment on function outbox.emitted is
    'The events that the calling transaction has emitted so far, in that order. For tests of applications, whose roles may '
    'not read the log.';

-- True if a relay sleeps: it then holds this lock exclusively, and only then is a notification worth its price, a lock
-- of the whole cluster at commit. Taken and given back in one expression, which leaves no point to be interrupted
-- between; nothing ever waits for it.
create or replace function outbox_internal.asleep() returns boolean
language sql volatile
return not (pg_try_advisory_lock_shared(1869967971, 1) and pg_advisory_unlock_shared(1869967971, 1));

-- Say which event of many is emitted next, for the message of an error; null: none is. A statement with set_config() would keep
-- the connection of a pooler such as RDS Proxy for this client. The body takes the place of the call.
create or replace function outbox.event_index(place bigint) returns text
language sql volatile
return set_config('outbox.event_index', coalesce(place::text, ''), true);
comment on function outbox.event_index is
    'Say which event of many is emitted next, for the message of an error: for drivers that emit many with one statement.';
