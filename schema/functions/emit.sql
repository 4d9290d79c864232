-- Emit one event; return its uid, or that of the event that was emitted before with this uid or unique key.
--
-- The transaction has its xid before it takes an id: see the table. `unique_key` is looked at before the uid is used up.
-- `outbox.wake` is a setting for those who prepare transactions, which must not have notified anybody.
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
    own_xid constant xid8 := pg_current_xact_id();
    event_id constant bigint := nextval('outbox.event_id_seq');
    chosen constant boolean := uid is not null;
    earlier uuid;
    fault text;
begin
    -- An event as most are has no fault: event_fault, which costs as much as half of the INSERT, looks at the others.
    -- PostgreSQL makes every expression ready again in each transaction, at a price for each function in it.
    if (headers is null and deliver_at is null and tenant is null and priority is null and unique_key is null
        and octet_length(type) <= 255 and not type ^@ 'outbox.' and type collate "C" ~ '^[\x21-\x29\x2b-\x7e]+$'
        -- No ceiling is lower than a KiB, so most events need not ask for it.
        and (octet_length(payload) <= 1024 or octet_length(payload) <= outbox_internal.payload_ceiling())
        and coalesce(current_setting('outbox.max_payload_bytes', true), '') = ''
        and (key is null or octet_length(key) <= 1024)
        and content_type in ('application/json', 'application/octet-stream')) is not true then
        fault := outbox_internal.event_fault(type, payload, key, headers, deliver_at, content_type, tenant, priority, unique_key,
                                             nullif(current_setting('outbox.max_payload_bytes', true), ''));
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
    end if;
    if not chosen then
        uid := outbox_internal.uid_of(event_id);
    end if;
    if unique_key is not null then
        earlier := outbox_internal.claim_unique_key(type, unique_key, uid, outbox_internal.emitter(), deliver_at);
        if earlier is not null then
            return earlier;
        end if;
    end if;
    if chosen then
        if not outbox_internal.claim_uid(uid, event_id, outbox_internal.emitter()) then
            delete from outbox.unique_key k where k.type = type and k.unique_key = unique_key;
            return uid;
        end if;
    end if;
    if deliver_at > clock_timestamp() then
        insert into outbox.scheduled (
            xid, id, uid, emitter, emitter_oid, priority, deliver_at, type, key, tenant, content_type, headers, payload
        )
        values (own_xid, event_id, uid, outbox_internal.emitter(), outbox_internal.emitter_oid(), priority, deliver_at, type, key,
                tenant, nullif(content_type, 'application/json'), headers, payload);
        return uid;
    end if;
    insert into outbox.event (
        xid, id, uid, emitter, shard, priority, deliver_at, type, key, tenant, content_type, headers, payload
    )
    values (own_xid, event_id, uid, outbox_internal.emitter_oid(), outbox_internal.shard_of(key, uid), priority, deliver_at, type,
            key, tenant, nullif(content_type, 'application/json'), headers, payload);
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

-- Emit one event with a JSON payload. One expression, which takes the place of its call when a statement is planned: so it
-- costs nothing beside outbox.emit_raw, whose rights the caller needs anyway.
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
language sql volatile
return outbox.emit_raw(type, convert_to(payload::text, 'UTF8'), key, headers, deliver_at, uid, 'application/json', tenant, priority,
                       unique_key);
comment on function outbox.emit is
    'Emit an event with a JSON payload in the caller''s transaction, and return its uid. It is relayed if the transaction '
    'commits. Example: with o as (insert into orders … returning id) select outbox.emit(''order.created'', '
    'jsonb_build_object(''id'', id)) from o';

-- Return the id of the event of the log with this uid, the newest one if the uid was used for several; null if the log has none.
-- A uid has the id of its event in it, or outbox.uid knows the id. The plan is a generic one, by ids.
create or replace function outbox_internal.event_id(wanted uuid) returns bigint
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    ids constant bigint[] := array[outbox_internal.id_in(wanted), (select u.id from outbox.uid u where u.uid = wanted)];
begin
    return (select e.id from outbox.event e where e.id = any (ids) and e.uid = wanted order by e.id + 0 desc limit 1);
end
$$;

-- Record a uid that a caller chose. True: it is new, so its event is to be emitted. False: this role has used it
-- before, and nothing is to be emitted. A uid that another role has used is refused by name.
--
-- Uids of version 7 may be those that emit makes, which leave no row in outbox.uid: they are looked for in the log,
-- near the time that they hold. The query is planned with its values and without computing on them, which leaves out
-- all other days: no partition is locked that emptying the log might wait for.
create or replace function outbox_internal.claim_uid(claimed uuid, event_id bigint, claimant text) returns boolean
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
    made_id bigint;
    is_new boolean;
begin
    -- No row is made for the uid of a scheduled event: its entry into the log would wait for this transaction.
    select s.emitter, s.emitter_oid into other, others from outbox.scheduled s where s.uid = claimed;
    is_new := not found;
    -- A row that was there may be deleted before it is read.
    for attempt in 1..3 loop
        exit when not is_new;
        insert into outbox.uid (uid, id, emitter, emitter_oid) values (claimed, event_id, claimant, own) on conflict do nothing;
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
        made_id := outbox_internal.id_in(claimed);
        select pg_get_userbyid(e.emitter)::text into other
          from outbox.event e
         where e.id = made_id and e.uid = claimed and e.emitter <> own
           and e.created_at >= earliest and e.created_at <= latest
         limit 1;
    end if;
    if other <> claimant and outbox_internal.is_others(other, others) then
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

-- The events that the calling transaction has emitted so far, in that order, scheduled ones among them: those that are recorded
-- under the caller's present role, including those that triggers and SECURITY DEFINER functions emitted. An application's role
-- may not read the log, and its tests ask what the code has emitted. Needs no transaction id, and takes none.
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
    select e.uid, e.type, e.key, e.payload, coalesce(e.content_type, 'application/json'), e.headers, e.deliver_at
      from (
        select l.id, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at
          from outbox.event l
         where l.xid = pg_current_xact_id_if_assigned() and l.emitter = outbox_internal.emitter_oid()
           and l.created_at >= now() - interval '1 minute'
        union all
        select s.id, s.uid, s.type, s.key, s.payload, s.content_type, s.headers, s.deliver_at
          from outbox.scheduled s
         where s.xid = pg_current_xact_id_if_assigned() and s.emitter = outbox_internal.emitter()
           and s.created_at >= now() - interval '1 minute'
      ) e
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
