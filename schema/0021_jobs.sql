-- Tenants and priorities of events, unique keys, and scheduled events that are cancelled or moved.
-- Relays made for version 2 work on this schema until the first scheduled event is cancelled or moved: they deliver a scheduled
-- event that is due when they read it without looking for a change.

-- ---------------------------------------------------------------------------------------------------------
-- Events
-- ---------------------------------------------------------------------------------------------------------

-- Emits wait behind this statement while it waits for an open transaction of the application, so each wait is short.
do $$
declare
    waits constant text := current_setting('lock_timeout');
begin
    for attempt in 1..40 loop
        begin
            perform set_config('lock_timeout', '50ms', true);
            alter table outbox.event add column tenant text collate "C", add column priority smallint;
            exit;
        exception when lock_not_available then
            if attempt = 40 then
                raise;
            end if;
            perform pg_sleep(0.05);
        end;
    end loop;
    perform set_config('lock_timeout', waits, true);
end
$$;
comment on column outbox.event.tenant is 'Whose event it is, in an application with several tenants.';
comment on column outbox.event.priority is 'The rank that the application gave it; null: 0.';
alter table outbox.delivery add column emitter text;
comment on column outbox.delivery.emitter is 'The role that emitted the event; null: the row is of an earlier version.';

-- ---------------------------------------------------------------------------------------------------------
-- Unique keys
-- ---------------------------------------------------------------------------------------------------------

-- The unique keys of events that are not done yet: the event of a key is done once each sink that was registered when it was
-- emitted, and whose patterns match it, has delivered or discarded it, or has it as a dead letter. A relay then deletes the key.
--
-- A row without a uid was made to lock its key, and belongs to no event yet.
create table outbox.unique_key (
    type text collate "C" not null,
    unique_key text collate "C" not null,
    uid uuid,
    emitter text not null,
    emitter_oid oid,
    claimed_at timestamptz not null default clock_timestamp(),
    look_at timestamptz not null default clock_timestamp(),
    primary key (type, unique_key)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
create index unique_key_look_at on outbox.unique_key (look_at);
create index unique_key_uid on outbox.unique_key (uid);
comment on table outbox.unique_key is 'Unique keys whose event is not done yet: see the parameter unique_key of outbox.emit.';
comment on column outbox.unique_key.look_at is 'When a relay next looks whether the event is done.';

-- Refuse the key of another role. A role that was renamed is still the one that has its keys, as in outbox.claim_uid.
create function outbox.require_own_key(event_type text, owner text, owner_oid oid, claimant text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if owner is distinct from claimant
       and not (owner_oid = (select r.oid from pg_roles r where r.rolname = claimant)
                and not exists (select from pg_roles r where r.rolname = owner)) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format(
                'outbox.emit: %sunique_key of type %s is in use by role "%s", and this is role "%s": a key belongs to the role '
                'whose event is not done',
                coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', ''),
                event_type, owner, claimant);
    end if;
end
$$;

-- Take a unique key for the event `new_uid`, and return null; or return the uid of the event that has it. While another
-- transaction has emitted an event with the key and is open, the call waits for its end. A key that is in use is only read:
-- emitters that share it neither wait for each other nor keep a relay from giving it back.
create function outbox.claim_unique_key(event_type text, wanted text, new_uid uuid, claimant text, due timestamptz) returns uuid
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    other uuid;
    owner text;
    owner_oid oid;
    own constant oid := (select r.oid from pg_roles r where r.rolname = claimant);
    -- An event that is scheduled for later is looked at when it is due, and at least once an hour.
    look constant timestamptz := least(greatest(due, clock_timestamp()), clock_timestamp() + interval '1 hour');
begin
    -- A key that was there may be gone before it is read. It is read first: an INSERT would wait for a relay that changes it.
    for attempt in 1..10 loop
        select k.uid, k.emitter, k.emitter_oid into other, owner, owner_oid
          from outbox.unique_key k where k.type = event_type and k.unique_key = wanted;
        if not found then
            insert into outbox.unique_key (type, unique_key, uid, emitter, emitter_oid, look_at)
            values (event_type, wanted, new_uid, claimant, own, look)
                on conflict do nothing;
            if found then
                return null;
            end if;
        elsif other is null then
            update outbox.unique_key k
               set uid = new_uid, emitter = claimant, emitter_oid = own, claimed_at = clock_timestamp(), look_at = look
             where k.type = event_type and k.unique_key = wanted and k.uid is null;
            if found then
                return null;
            end if;
        else
            perform outbox.require_own_key(event_type, owner, owner_oid, claimant);
            return other;
        end if;
    end loop;
    raise exception using errcode = 'serialization_failure',
        message = format('a unique_key of type %s was removed while it was looked at: try again', event_type);
end
$$;

-- Lock the unique keys of several events that are free, so that transactions that emit some of the same keys in another order
-- do not wait for each other. Called before outbox.emit_raw by the same statement. Nulls are left out.
create function outbox.lock_unique_keys(types text[], unique_keys text[]) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    wanted record;
    locked integer := 0;
begin
    for wanted in
        select distinct w.type collate "C" as type, w.unique_key collate "C" as unique_key
          from unnest(types, unique_keys) w (type, unique_key)
         where octet_length(w.unique_key) between 1 and 255 and octet_length(w.type) between 1 and 255
         order by 1, 2
    loop
        if not exists (select from outbox.unique_key k where k.type = wanted.type and k.unique_key = wanted.unique_key) then
            insert into outbox.unique_key (type, unique_key, emitter)
            values (wanted.type, wanted.unique_key, outbox.emitter())
                on conflict do nothing;
        end if;
        perform from outbox.unique_key k
          where k.type = wanted.type and k.unique_key = wanted.unique_key and k.uid is null
            for no key update;
        locked := locked + 1;
    end loop;
    return locked;
end
$$;

-- Delete unique keys whose event is done, among at most `most` that are to be looked at, and return how many were deleted. An
-- event that is not done is looked at again in a second, or in a twentieth of its age if that is longer, up to half a minute;
-- one that is scheduled for later when it is due, and at least once an hour.
--
-- Keys are looked at without a lock, because emits wait for it: an event that is done stays done.
create function outbox.finish_unique_keys(most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    uids uuid[];
    done uuid[];
    late uuid[];
    look_times timestamptz[];
    free integer;
    finished integer;
begin
    most := least(greatest(coalesce(most, 500), 1), 1000);
    -- Keys that were locked and got no event.
    delete from outbox.unique_key k
     where k.ctid = any (array(select l.ctid from outbox.unique_key l
                                where l.uid is null and l.look_at <= clock_timestamp() limit most for update skip locked));
    get diagnostics free = row_count;
    -- Positions that were stored in another cluster do not tell which transactions of this one they have passed: see outbox.tick.
    if (select m.system_identifier from outbox.meta m) is distinct from (select c.system_identifier from pg_control_system() c) then
        return free;
    end if;
    uids := array(select k.uid from outbox.unique_key k
                   where k.look_at <= clock_timestamp() and k.uid is not null order by k.look_at limit most);
    if cardinality(uids) = 0 then
        return free;
    end if;
    with keys as materialized (
        select k.uid, k.claimed_at from outbox.unique_key k where k.uid = any (uids)
    ),
    logged as materialized (
        select k.uid, k.claimed_at, e.id, e.xid, e.shard, e.type, coalesce(c.deliver_at, e.deliver_at) as due
          from keys k
          left join lateral (
            select l.id, l.xid, l.shard, l.type, l.deliver_at
              from outbox.event l
             where l.uid = k.uid and l.created_at >= k.claimed_at - interval '1 day'
             order by l.id + 0 desc limit 1
          ) e on true
          left join lateral (
            select s.deliver_at from outbox.scheduled_change s where s.uid = k.uid limit 1
          ) c on true
    ),
    readers as materialized (
        select k.name, k.created_at, l.shard, outbox.types_of(k.name) as types, m.floor, p.a_seq,
               p.a_snapshot, p.a_next, p.b_snapshot, p.last_id,
               -- A session that still reads with other patterns.
               coalesce(h.owner is not null and h.lease_until > clock_timestamp() and h.generation is distinct from k.generation,
                        false) as differs,
               p.a_seq is not null and (h.owner is null or p.epoch = h.epoch) as counts
          from outbox.sink k
         cross join outbox.meta m
         cross join (select distinct l.shard from logged l where l.shard is not null) l
          left join outbox.shard h on h.sink = k.name and h.shard = l.shard
          left join outbox.standing p on p.sink = k.name and p.shard = l.shard
    ),
    judged as (
        select l.uid, l.claimed_at, l.due,
               not exists (
                    select from outbox.delivery d join outbox.sink k on k.name = d.sink
                     where d.uid = l.uid and d.state <> 'dead' and k.created_at <= l.claimed_at)
               and not exists (
                    select from readers r
                     where r.shard = l.shard and r.created_at <= l.claimed_at
                       and (r.differs or r.types is null or l.type like any (r.types))
                       and not (r.counts and outbox.position_passed(l.id, l.xid, r.a_seq, r.a_snapshot, r.a_next, r.b_snapshot,
                                                                    r.last_id, r.floor))
                       and not exists (
                            select from outbox.delivery d
                             where d.uid = l.uid and (d.sink = r.name) is true)) as done  -- not by its primary key
          from logged l
    )
    select array_agg(j.uid) filter (where j.done), array_agg(j.uid) filter (where not j.done),
           array_agg(clock_timestamp()
                     + greatest(interval '1 second', least((clock_timestamp() - j.claimed_at) / 20, interval '30 seconds'),
                                case when j.due is not null then least(j.due - clock_timestamp(), interval '1 hour') end))
               filter (where not j.done)
      into done, late, look_times
      from judged j;
    delete from outbox.unique_key k
     where k.ctid = any (array(select l.ctid from outbox.unique_key l where l.uid = any (done) for update skip locked));
    get diagnostics finished = row_count;
    update outbox.unique_key k set look_at = n.look_at
      from (
        select l.uid, w.look_at
          from unnest(late, look_times) w (uid, look_at)
          join outbox.unique_key l on l.uid = w.uid
           for update of l skip locked
      ) n
     where k.uid = n.uid;
    return free + finished;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- emit
-- ---------------------------------------------------------------------------------------------------------

-- The fault of what a work queue needs, as a message, or null.
create function outbox.queue_fault(tenant text, priority integer, unique_key text) returns text
language sql stable
return 'outbox.emit: ' || coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', '') || case
    when octet_length(tenant) not between 1 and 255 then
        format('tenant must have 1 to 255 bytes; this one has %s', octet_length(tenant))
    when priority not between -32768 and 32767 then
        format('priority must be a number from -32768 to 32767; this one is %s', priority)
    when octet_length(unique_key) not between 1 and 255 then
        format('unique_key must have 1 to 255 bytes; this one has %s', octet_length(unique_key))
end;

drop function outbox.emit_raw(text, bytea, text, jsonb, timestamptz, uuid, text);

-- As in version 9, with three more parameters. `unique_key` is looked at before the uid is used up.
create function outbox.emit_raw(
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
    if outbox.is_usual(type, payload, key, headers, deliver_at, content_type) is not true then
        fault := outbox.event_fault(type, payload, key, headers, deliver_at, content_type,
                                    nullif(current_setting('outbox.max_payload_bytes', true), ''));
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
    end if;
    if tenant is not null or priority is not null or unique_key is not null then
        fault := outbox.queue_fault(tenant, priority, unique_key);
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
        if unique_key is not null then
            chosen := uid is not null;
            uid := coalesce(uid, outbox.uuid7());
            earlier := outbox.claim_unique_key(type, unique_key, uid, outbox.emitter(), deliver_at);
            if earlier is not null then
                return earlier;
            end if;
            if chosen and not outbox.claim_uid(uid, outbox.emitter()) then
                delete from outbox.unique_key k where k.type = type and k.unique_key = unique_key;
                return uid;
            end if;
            chosen := false;
        end if;
    end if;
    if uid is null then
        uid := outbox.uuid7();
    elsif chosen is null then
        if not outbox.claim_uid(uid, outbox.emitter()) then
            return uid;
        end if;
    end if;
    insert into outbox.event (
        shard, uid, type, key, payload, content_type, headers, deliver_at, emitter, tenant, priority
    )
    values (outbox.shard_of(key, uid), uid, type, key, payload, content_type, headers, deliver_at, outbox.emitter(),
            tenant, priority);
    if outbox.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;

drop function outbox.emit(text, jsonb, text, jsonb, timestamptz, uuid);

create function outbox.emit(
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
    if outbox.is_usual(type, body, key, headers, deliver_at, 'application/json') is not true then
        fault := outbox.event_fault(type, body, key, headers, deliver_at, 'application/json',
                                    nullif(current_setting('outbox.max_payload_bytes', true), ''));
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
    end if;
    if tenant is not null or priority is not null or unique_key is not null then
        fault := outbox.queue_fault(tenant, priority, unique_key);
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
        if unique_key is not null then
            chosen := uid is not null;
            uid := coalesce(uid, outbox.uuid7());
            earlier := outbox.claim_unique_key(type, unique_key, uid, outbox.emitter(), deliver_at);
            if earlier is not null then
                return earlier;
            end if;
            if chosen and not outbox.claim_uid(uid, outbox.emitter()) then
                delete from outbox.unique_key k where k.type = type and k.unique_key = unique_key;
                return uid;
            end if;
            chosen := false;
        end if;
    end if;
    if uid is null then
        uid := outbox.uuid7();
    elsif chosen is null then
        if not outbox.claim_uid(uid, outbox.emitter()) then
            return uid;
        end if;
    end if;
    insert into outbox.event (
        shard, uid, type, key, payload, content_type, headers, deliver_at, emitter, tenant, priority
    )
    values (outbox.shard_of(key, uid), uid, type, key, body, 'application/json', headers, deliver_at, outbox.emitter(),
            tenant, priority);
    if outbox.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Scheduled events that are cancelled or moved
-- ---------------------------------------------------------------------------------------------------------

-- An event that is scheduled for later becomes a row of outbox.delivery for each sink, and stays one until it is delivered.
-- An application does not touch these rows: relays would wait for its transaction. It writes a change here, under a lock on
-- the uid. Who makes a row of the event obeys the change, and so does who claims the row: a claim tries that lock, and passes
-- a row by whose uid is locked. A change that is not committed when its row is made is seen by the claim; a change to an
-- earlier time is carried out by a relay, within a second.
--
-- Changes are kept as long as their event, so that new sinks, seeks and replays obey them too.
create table outbox.scheduled_change (
    uid uuid primary key,
    created_at timestamptz not null,
    deliver_at timestamptz,
    emitter text not null,
    changed_at timestamptz not null default clock_timestamp(),
    looks smallint not null default 0,
    look_at timestamptz default clock_timestamp()
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
create index scheduled_change_look_at on outbox.scheduled_change (look_at) where look_at is not null;
create index scheduled_change_over on outbox.scheduled_change (coalesce(deliver_at, changed_at)) where look_at is null;
comment on table outbox.scheduled_change is 'Scheduled events that outbox.cancel or outbox.reschedule has changed.';
comment on column outbox.scheduled_change.created_at is 'When the event was emitted.';
comment on column outbox.scheduled_change.deliver_at is 'The new time; null: cancelled.';
comment on column outbox.scheduled_change.look_at is 'When a relay next carries out the change; null: it is carried out.';

-- The key of the advisory lock on the time of an event.
create function outbox.uid_lock(uid uuid) returns bigint
language sql immutable
return hashtextextended(uid::text collate "C", 1869967971);

-- Return the scheduled event with a uid: from the log or, once its day is emptied, from a row. No other days of the log are
-- locked than the one in which the uid was made or first used: emptying a day waits for every lock on it.
create function outbox.scheduled_event(wanted uuid, out emitter text, out deliver_at timestamptz, out created_at timestamptz)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    made_at timestamptz := case when get_byte(uuid_send(wanted), 6) >> 4 = 7 then
        to_timestamp(('x' || encode(substring(uuid_send(wanted) from 1 for 6), 'hex'))::bit(48)::bigint / 1000.0) end;
    earliest timestamptz;
    latest timestamptz;
begin
    for attempt in 1..2 loop
        if made_at is not null then
            earliest := made_at - interval '10 minutes';
            latest := made_at + case when attempt = 1 then interval '10 minutes' else interval '1 hour' end;
            select e.emitter, e.deliver_at, e.created_at into emitter, deliver_at, created_at
              from outbox.event e
             where e.uid = wanted and e.created_at >= earliest and e.created_at <= latest
             order by e.id + 0 desc limit 1;
            if found then
                return;
            end if;
        end if;
        -- A uid that the caller chose may have any time, or none.
        made_at := (select u.created_at from outbox.uid u where u.uid = wanted);
    end loop;
    select d.emitter, d.deliver_at, d.created_at into emitter, deliver_at, created_at
      from outbox.delivery d
     where d.uid = wanted and d.sink < '~' and outbox.is_untouched(d)
     order by d.id desc limit 1;
end
$$;

-- Change a scheduled event of the calling role, and return whether that was in time: true if it had not become due, and no sink
-- has tried to deliver it. `new_time` null cancels it.
create function outbox.change_scheduled(wanted uuid, new_time timestamptz, called text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    most constant integer := 1000;  -- of the locks that the whole server has room for
    -- Anything may have been set as a default of the role.
    counted constant text := current_setting('outbox.scheduled_changes', true);
    changes constant integer := case when counted collate "C" ~ '^[0-9]{1,4}$' then counted::integer else 0 end;
    me constant text := outbox.emitter();
    event record;
    changed_to timestamptz;
    is_changed boolean;
begin
    if wanted is null then
        raise exception using errcode = 'invalid_parameter_value', message = format('%s: uid must not be null', called);
    end if;
    select e.emitter, e.deliver_at, e.created_at into event from outbox.scheduled_event(wanted) e;
    -- An event that was due when it was emitted is delivered from the log, where no sink looks for a change.
    if event.deliver_at is null or event.deliver_at <= event.created_at then
        return false;
    end if;
    if event.emitter is distinct from me then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s: event %s was emitted by %s, and this is role "%s"', called, wanted,
                             coalesce('role "' || event.emitter || '"', 'an unknown role'), me);
    end if;
    if changes >= most then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s: a transaction can change at most %s scheduled events: commit, and go on in another one',
                             called, most);
    end if;
    perform set_config('outbox.scheduled_changes', (changes + 1)::text, true);
    perform pg_advisory_xact_lock(outbox.uid_lock(wanted));
    select c.deliver_at into changed_to from outbox.scheduled_change c where c.uid = wanted and c.created_at = event.created_at;
    is_changed := found;
    if is_changed and changed_to is null then
        return new_time is null;
    end if;
    if coalesce(changed_to, event.deliver_at) <= clock_timestamp()
       or exists (select from outbox.delivery d
                   where d.uid = wanted and d.created_at = event.created_at
                     and (d.state <> 'waiting' or d.attempts > 0 or d.claims > 0 or d.lease is not null
                          or d.last_attempt_at is not null)) then
        return false;
    end if;
    insert into outbox.scheduled_change as c (uid, created_at, deliver_at, emitter)
    values (wanted, event.created_at, new_time, me)
        on conflict (uid) do update
       set created_at = excluded.created_at, deliver_at = excluded.deliver_at, emitter = excluded.emitter,
           changed_at = excluded.changed_at, looks = 0, look_at = excluded.look_at;
    if new_time is null then
        -- The next event with its unique key is a new one, in this transaction too.
        delete from outbox.unique_key k where k.uid = wanted;
    end if;
    return true;
end
$$;

-- Cancel a scheduled event in the caller's transaction. True: no sink will deliver it once that is committed. False: it was
-- too late, or there is no such event, and nothing has changed.
create function outbox.cancel(uid uuid) returns boolean
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select outbox.change_scheduled(uid, null, 'outbox.cancel')
$$;

-- Move a scheduled event to another time in the caller's transaction, and return whether that was in time, as outbox.cancel
-- does. A time that has passed makes it due at once.
create function outbox.reschedule(uid uuid, at timestamptz) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if at is null or at not between '0001-01-01 00:00:00+00' and '9998-12-31 23:59:59.999999+00' then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('outbox.reschedule: at must be in the years 1 to 9998 (UTC); this one is %s',
                             coalesce(at::text, 'null: outbox.cancel cancels an event'));
    end if;
    return outbox.change_scheduled(uid, at, 'outbox.reschedule');
end
$$;

-- True if a row is a scheduled event that no sink has claimed.
create function outbox.is_untouched(d outbox.delivery) returns boolean
language sql immutable
return d.deliver_at is not null and not d.ordered and d.state = 'waiting' and d.attempts = 0 and d.claims = 0
       and d.lease is null and d.last_attempt_at is null;

-- Delete rows of cancelled events, with a mark for each, and return how many. To be called with the rows locked.
create function outbox.drop_cancelled(ids bigint[], sinks text[]) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    dropped bigint;
begin
    with gone as (
        delete from outbox.delivery d using unnest(ids, sinks) w (id, sink)
         where d.id = w.id and d.sink = w.sink
        returning d.id, d.sink, d.uid, d.created_at
    ),
    marked as (
        insert into outbox.discarded (sink, id, uid, role_name, reason)
        select g.sink, coalesce(e.id, g.id), g.uid, c.emitter, 'cancelled'
          from gone g
          join outbox.scheduled_change c on c.uid = g.uid
          left join lateral (
            select l.id from outbox.event l where l.uid = g.uid and l.created_at = g.created_at order by l.id + 0 desc limit 1
          ) e on true
            on conflict do nothing
    )
    select count(*) into dropped from gone;
    return dropped;
end
$$;

-- Of scheduled rows that the caller has locked, return those that may be claimed now, at most 100. Others are passed by: their
-- uid is locked by an open transaction that may change them, and they are looked at again in a second; or they have been moved
-- to a later time, or cancelled.
create function outbox.take_scheduled(sink_name text, wanted bigint[]) returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    most constant integer := 100;  -- of the locks that the whole server has room for
    tried constant bigint[] := array(
        select d.id from outbox.delivery d where d.sink = sink_name and d.id = any (wanted) order by d.due_at, d.id limit most);
    free bigint[];
    uids uuid[];
    changed bigint[];
    times timestamptz[];
begin
    select array_agg(l.id), array_agg(l.uid) into free, uids
      from (select d.id, d.uid from outbox.delivery d
             where d.sink = sink_name and d.id = any (tried) and pg_try_advisory_xact_lock(outbox.uid_lock(d.uid))) l;
    free := coalesce(free, '{}');
    if cardinality(free) < cardinality(tried) then
        update outbox.delivery d set due_at = clock_timestamp() + interval '1 second'
         where d.sink = sink_name and d.id = any (tried) and d.id <> all (free);
    end if;
    -- With the locks, and so after the commit of every change that was made under them. Two steps: a plan made while there
    -- was no change would go through all of them for each row.
    select array_agg(d.id), array_agg(c.deliver_at) into changed, times
      from (select s.uid, s.created_at, s.deliver_at from outbox.scheduled_change s where s.uid = any (uids) offset 0) c
      join outbox.delivery d on d.sink = sink_name and d.id = any (free) and d.uid = c.uid
                                and (d.created_at = c.created_at) is true;
    if changed is null then
        return free;
    end if;
    update outbox.delivery d set due_at = n.deliver_at, deliver_at = n.deliver_at
      from unnest(changed, times) n (id, deliver_at)
     where d.sink = sink_name and d.id = n.id and n.deliver_at is not null;
    perform outbox.drop_cancelled(array_agg(n.id), array_agg(sink_name))
       from unnest(changed, times) n (id, deliver_at) where n.deliver_at is null
     having count(*) > 0;
    return array(select f from unnest(free) f
                  where not exists (select from unnest(changed, times) n (id, deliver_at)
                                     where n.id = f and (n.deliver_at is null or n.deliver_at > clock_timestamp())));
end
$$;

-- Mark those of these events that have no row, and were cancelled, as discarded; return how many there are.
create function outbox.mark_cancelled(sink_name text, ids bigint[]) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    uids uuid[];
    marked bigint;
begin
    select array_agg(e.uid) into uids from outbox.event e where e.id = any (ids) and e.deliver_at is not null;
    with cancelled as materialized (
        select e.id, e.uid, c.emitter
          from (select s.uid, s.created_at, s.emitter from outbox.scheduled_change s
                 where s.uid = any (uids) and s.deliver_at is null offset 0) c
          join outbox.event e on e.id = any (ids) and e.uid = c.uid and (e.created_at = c.created_at) is true
         where not exists (select from outbox.delivery d where d.sink = sink_name and d.id = e.id)
    ),
    marks as (
        insert into outbox.discarded (sink, id, uid, role_name, reason)
        select sink_name, c.id, c.uid, c.emitter, 'cancelled' from cancelled c where sink_name < '~'
            on conflict do nothing
    )
    select count(distinct c.id) into marked from cancelled c;
    return marked;
end
$$;

-- Carry out changes on rows that were made before, at most `most` changes, and return how many were looked at. Each change is
-- looked at twice, the second time a minute later: a row may have been under way to the table without it. From the first change
-- on, no relay of an earlier version begins on this schema.
create function outbox.apply_scheduled_changes(most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    uids uuid[];
    ids bigint[];
    sinks text[];
begin
    most := least(greatest(coalesce(most, 500), 1), 1000);
    uids := array(select c.uid from outbox.scheduled_change c
                   where c.look_at <= clock_timestamp() order by c.look_at limit most
                     for update skip locked);
    if cardinality(uids) = 0 then
        return 0;
    end if;
    update outbox.meta m set min_relay = 21 where m.min_relay < 21;
    update outbox.delivery d set due_at = c.deliver_at, deliver_at = c.deliver_at
      from (
        select d.id, d.sink, c.deliver_at
          from outbox.scheduled_change c
          join outbox.delivery d on d.uid = c.uid and d.created_at = c.created_at
         where c.uid = any (uids) and c.deliver_at is not null and d.sink < '~' and outbox.is_untouched(d)
           and d.deliver_at is distinct from c.deliver_at
           for update of d skip locked
      ) c
     where d.id = c.id and d.sink = c.sink;
    select array_agg(l.id), array_agg(l.sink) into ids, sinks
      from (
        select d.id, d.sink
          from outbox.scheduled_change c
          join outbox.delivery d on d.uid = c.uid and d.created_at = c.created_at
         where c.uid = any (uids) and c.deliver_at is null and d.sink < '~' and outbox.is_untouched(d)
           for update of d skip locked
      ) l;
    if ids is not null then
        perform outbox.drop_cancelled(ids, sinks);
    end if;
    -- The unique key of a moved event is looked at when the event is due. A cancelled one has given it back.
    update outbox.unique_key k
       set look_at = least(greatest(c.deliver_at, clock_timestamp()), clock_timestamp() + interval '1 hour')
      from (
        select k.uid, c.deliver_at from outbox.scheduled_change c join outbox.unique_key k on k.uid = c.uid
         where c.uid = any (uids) and c.deliver_at is not null
           for update of k skip locked
      ) c
     where k.uid = c.uid;
    update outbox.scheduled_change c
       set looks = c.looks + 1,
           look_at = case when c.looks = 0 then clock_timestamp() + interval '1 minute' end
     where c.uid = any (uids);
    return cardinality(uids);
end
$$;

-- Delete changes of events that are neither in the log nor a row, up to `most`, and return how many. Ten times as many are
-- looked at, those that are over longest.
create function outbox.trim_scheduled_changes(most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    removed integer;
begin
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    delete from outbox.scheduled_change c
     where c.uid = any (array(
            select o.uid
              from (
                select s.uid, s.created_at from outbox.scheduled_change s
                 where s.look_at is null and coalesce(s.deliver_at, s.changed_at) < clock_timestamp()
                 order by coalesce(s.deliver_at, s.changed_at) limit 10 * most
              ) o
             where o.created_at < (select e.created_at from outbox.event e order by e.id limit 1)
               and not exists (select from outbox.event e where e.uid = o.uid)
               and not exists (select from outbox.delivery d where d.uid = o.uid)
             limit most));
    get diagnostics removed = row_count;
    return removed;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Claim and settle
-- ---------------------------------------------------------------------------------------------------------

-- As in version 14, and scheduled rows are claimed if no change says otherwise.
create or replace function outbox.claim_rows(
    sink_name text, owner_id uuid, lease_id uuid, lease_for double precision, most_rows integer, most_bytes bigint,
    hold boolean, keys text[], sweep boolean, suspects boolean, with_followers boolean, most_payload bigint default null
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, ordered boolean, attempts integer, claims integer, fault text
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    first_time constant timestamptz := '0001-01-01 00:00:00+00';
    last_time constant timestamptz := '9999-01-01 00:00:00+00';
    ceiling constant bigint := case when most_payload is not null then least(most_payload, outbox.payload_ceiling()) end;
    waiting bigint[];
    held bigint[];
    behind bigint[] := '{}';
    chosen bigint[];
    scheduled bigint[];
    counted integer := case when outbox.known_down(sink_name) then 0 else 1 end;
begin
    if suspects then
        chosen := array(
            select d.id from outbox.delivery d
             where d.sink = sink_name and d.suspect and d.state <> 'dead' and d.due_at <= now()
               and (d.lease_until is null or d.lease_until <= now())
               and (not d.ordered or (
                    not exists (
                        select from outbox.delivery f
                         where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered and f.state <> 'dead')
                    and not (hold and coalesce(outbox.first_dead(sink_name, d.key) < d.id, false))))
             order by d.due_at, d.id
             limit 1
               for update skip locked
        );
    else
        -- Rows that are passed by are due later, so that those behind them come next.
        for turn in 1..25 loop
            waiting := array(
                select d.id from outbox.delivery d
                 where d.sink = sink_name and d.state = 'waiting' and d.due_at <= now()
                   and (d.lease_until is null or d.lease_until <= now()) and not d.suspect
                   and (not d.ordered or (
                        not exists (
                            select from outbox.delivery f
                             where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered and f.state <> 'dead')
                        and not (hold and coalesce(outbox.first_dead(sink_name, d.key) < d.id, false))))
                 order by d.due_at, d.id
                 limit most_rows
                   for update skip locked
            );
            exit when waiting = '{}';
            scheduled := array(
                select d.id from outbox.delivery d
                 where d.sink = sink_name and d.id = any (waiting) and outbox.is_untouched(d));
            exit when scheduled = '{}';
            waiting := array(select w from unnest(waiting) w where w <> all (scheduled))
                       || outbox.take_scheduled(sink_name, scheduled);
            exit when waiting <> '{}';
        end loop;
        if sweep then
            keys := array(select k.key from outbox.held_keys(sink_name, null, null) k);
        end if;
        held := array(
            select h.id from unnest(keys) k (key)
             cross join lateral (
                select d.id, d.state, d.due_at, d.lease_until, d.suspect from outbox.delivery d
                 where d.sink = sink_name and d.key = k.key and d.ordered and d.state <> 'dead'
                 order by d.id limit 1
             ) h
             where h.state = 'held' and h.due_at <= now()
               and (h.lease_until is null or h.lease_until <= now()) and not h.suspect
               and not (hold and coalesce(outbox.first_dead(sink_name, k.key) < h.id, false))
             limit most_rows
        );
        if with_followers and cardinality(waiting || held) between 1 and most_rows - 1 then
            behind := array(
                select r.id from outbox.delivery h
                 cross join lateral (
                    select d.id, d.due_at, d.lease_until, d.last_error, d.suspect from outbox.delivery d
                     where d.sink = sink_name and d.key = h.key and d.ordered and d.id > h.id and d.state <> 'dead'
                     order by d.id limit most_rows / cardinality(waiting || held)
                 ) r
                 where h.sink = sink_name and h.id = any (waiting || held) and h.ordered and h.last_error is null
                   and r.last_error is null and not r.suspect and r.due_at <= now()
                   and (r.lease_until is null or r.lease_until <= now())
            );
        end if;
        chosen := array(
            select c.id from (
                select b.id, b.follows, sum(b.bytes) over (order by b.follows, b.id) - b.bytes as before
                  from (
                    select d.id, d.id = any (behind) as follows,
                           case when octet_length(d.payload) > ceiling then 0
                                else coalesce(octet_length(d.payload), 0) end
                           + coalesce(octet_length(d.key), 0)
                           + case when d.headers is null then 0 else octet_length(d.headers::text) end as bytes
                      from outbox.delivery d
                     where d.sink = sink_name and d.id = any (waiting || held || behind)
                  ) b
            ) c
            where c.before < most_bytes or c.before <= 0
            order by c.follows, c.id
            limit most_rows
        );
        -- A statement of its own: joined to the change, a plan made while there was no row goes through all rows of the
        -- sink for each row that is claimed.
        if held <> '{}' or behind <> '{}' then
            chosen := array(
                select l.id from outbox.delivery l
                 where l.sink = sink_name and l.id = any (chosen) and l.state <> 'dead' and l.due_at <= now()
                   and (l.lease_until is null or l.lease_until <= now())
                   for update skip locked
            );
        end if;
        -- A row that must wait, or was claimed by another relay since it was looked for, may come before what is locked
        -- here.
        if behind <> '{}' then
            chosen := array(
                select i.id from (
                    select l.key, l.ordered, array_agg(l.id) as ids,
                           case when hold and l.ordered then outbox.first_dead(sink_name, l.key) end as dead
                      from outbox.delivery l
                     where l.sink = sink_name and l.id = any (chosen) group by l.key, l.ordered
                ) c
                 left join lateral (
                    select f.id from outbox.delivery f
                     where f.sink = sink_name and f.key = c.key and f.ordered and f.state <> 'dead'
                       and f.id <> all (c.ids)
                     order by f.id limit 1
                ) other on c.ordered
                 cross join lateral unnest(c.ids) i (id)
                 where (other.id is null or i.id < other.id) and (c.dead is null or i.id < c.dead)
            );
        end if;
    end if;
    return query
    update outbox.delivery d
       set owner = owner_id, lease = lease_id, lease_until = clock_timestamp() + lease_for * interval '1 second',
           claims = least(d.claims::bigint + counted, 2147483647)::integer
     where d.sink = sink_name and d.id = any (chosen)
    returning d.id, d.shard, d.uid::text, d.type, d.key,
              case when ceiling is null
                     or octet_length(d.payload) <= ceiling
                        and (d.deliver_at is null or d.deliver_at >= first_time and d.deliver_at < last_time)
                   then d.payload end,
              d.content_type, d.headers::text,
              case when ceiling is null or d.deliver_at >= first_time and d.deliver_at < last_time then d.deliver_at end,
              case when ceiling is null then d.created_at
                   else greatest(first_time, least(d.created_at, last_time - interval '1 second')) end,
              d.ordered, d.attempts, d.claims,
              case when ceiling is not null and (d.deliver_at < first_time or d.deliver_at >= last_time)
                   then 'deliver_at lies outside the years 1 to 9998'
                   when ceiling is not null and d.payload is null then 'payload is null'
                   when octet_length(d.payload) > ceiling
                   then format('payload has %s bytes, more than the ceiling of %s', octet_length(d.payload), ceiling)
              end;
end
$$;

-- As in version 9, and changes of scheduled events are obeyed: a cancelled one is marked as discarded, and becomes no row.
create or replace function outbox.settle(
    sink_name text, owner_id uuid,
    shards smallint[], epochs bigint[], places integer[],
    a_seqs bigint[], a_snapshots pg_snapshot[], a_nexts bigint[],
    b_seqs bigint[], b_snapshots pg_snapshot[], b_nexts bigint[], last_ids bigint[],
    ids bigint[], states text[], ordereds boolean[], due_in double precision[], attempt_counts integer[], claim_counts integer[],
    leases uuid[], lease_for double precision[], errors text[], statuses integer[], last_attempts text[],
    fence_shards smallint[], fence_epochs bigint[]
) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    mine integer;
    stored integer;
    wanted integer;
begin
    if cardinality(ids) > 0 then
        select count(*) into mine from (
            select 1 from unnest(fence_shards, fence_epochs) f (shard, epoch)
              join outbox.shard s on s.sink = sink_name and s.shard = f.shard and s.epoch = f.epoch and s.owner = owner_id
             order by s.shard
               for share of s
        ) locked;
        if mine <> cardinality(fence_shards) then
            return false;
        end if;
        insert into outbox.delivery (
            sink, id, shard, state, ordered, due_at, attempts, claims, lease, lease_until, owner, last_error, last_status,
            last_attempt_at, last_attempt, uid, type, key, payload, content_type, headers, deliver_at, created_at, emitter
        )
        select sink_name, e.id, e.shard, r.state, r.ordered,
               coalesce(clock_timestamp() + r.due_in * interval '1 second', c.deliver_at, e.deliver_at, clock_timestamp()),
               r.attempts, r.claims, r.lease, clock_timestamp() + r.lease_for * interval '1 second',
               case when r.lease is not null then owner_id end, r.error, r.status,
               case when r.attempts > 0 or r.lease is not null or r.last_attempt is not null then clock_timestamp() end,
               r.last_attempt::jsonb,
               e.uid, e.type, e.key, e.payload, e.content_type, e.headers, coalesce(c.deliver_at, e.deliver_at), e.created_at,
               e.emitter
          from unnest(ids, states, ordereds, due_in, attempt_counts, claim_counts, leases, lease_for, errors, statuses,
                      last_attempts)
               r (id, state, ordered, due_in, attempts, claims, lease, lease_for, error, status, last_attempt)
          join outbox.event e on e.id = r.id and not outbox.is_erased(e.content_type, e.payload)
          left join lateral (
            select s.uid, s.deliver_at from outbox.scheduled_change s
             where e.deliver_at is not null and s.uid = e.uid and (s.created_at = e.created_at) is true  -- not by its index
          ) c on true
         where c.uid is null or c.deliver_at is not null
        on conflict (sink, id) do nothing;
        -- Not joined: a plan made while there was no row would go through all rows of the sink for each id.
        select count(*) into stored from outbox.delivery d where d.sink = sink_name and d.id = any (ids);
        select count(distinct r.id) into wanted from unnest(ids) r (id);
        if stored <> wanted then
            stored := stored + outbox.mark_cancelled(sink_name, ids);
        end if;
        if stored <> wanted then
            raise exception 'outbox.settle: % of % events are no longer in the log', wanted - stored, wanted;
        end if;
    end if;
    if cardinality(shards) > 0 then
        insert into outbox.progress (
            sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id
        )
        select sink_name, t.shards, t.epochs, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, p.last_id
          from unnest(a_seqs, a_snapshots, a_nexts, b_seqs, b_snapshots, b_nexts, last_ids)
               with ordinality p (a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id, place)
         cross join lateral (
            select array_agg(m.shard order by m.shard) as shards, array_agg(m.epoch order by m.shard) as epochs
              from unnest(shards, epochs, places) m (shard, epoch, place) where m.place = p.place
         ) t;
    end if;
    return true;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Replays, and why
-- ---------------------------------------------------------------------------------------------------------

-- The reason for which a replay to another sink passes an event by: it is not due, or was cancelled.
create function outbox.not_to_replay(event_uid uuid, emitted_at timestamptz, event_time timestamptz) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when event_time is null then null
                when c.uid is not null and c.deliver_at is null then 'discarded'
                when coalesce(c.deliver_at, event_time) > now() then 'not due' end
      from (values (1)) one (n)
      left join outbox.scheduled_change c on c.uid = event_uid and c.created_at = emitted_at
$$;

-- As in version 15, and changes of scheduled events are obeyed.
create or replace function outbox.read_replayed(
    replay_id bigint, shards smallint[], after_id bigint, upto_id bigint, most_rows integer, most_bytes bigint,
    most_payload bigint
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
)
language plpgsql stable security definer rows 1000
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_sort = off
set enable_incremental_sort = off
set enable_bitmapscan = off
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
    first_time constant timestamptz := '0001-01-01 00:00:00+00';
    last_time constant timestamptz := '9999-01-01 00:00:00+00';
    r constant outbox.replay := (select p from outbox.replay p where p.id = replay_id);
    ceiling constant bigint := least(most_payload, outbox.payload_ceiling());
    wanted constant smallint[] := array(select s from unnest(shards) s
                                        intersect select s from unnest(outbox.replay_shards(r.key)) s);
    low constant bigint := greatest(after_id, r.from_id);
    high constant bigint := least(upto_id, r.upto_id);
    chosen bigint[];
    passed_ids bigint[];
    passed_shards smallint[];
    reasons text[];
    returned bigint;
begin
    if r.floor is distinct from (select m.floor from outbox.meta m) then
        raise exception using errcode = 'serialization_failure',
            message = format('replay %s has not adopted the last rebase yet', replay_id);
    end if;
    if r.ids is not null then
        select array_agg(c.id) filter (where c.reason is null), array_agg(c.id) filter (where c.reason is not null),
               array_agg(c.shard) filter (where c.reason is not null), array_agg(c.reason) filter (where c.reason is not null)
          into chosen, passed_ids, passed_shards, reasons
          from (
            select e.id, e.shard,
                   case when r.redirected then case when e.deliver_at is not null
                                                     then outbox.not_to_replay(e.uid, e.created_at, e.deliver_at) end
                        when (select true from outbox.delivery d where d.id = e.id and d.sink = r.target) then 'row'
                        when (select m.uid = e.uid from outbox.discarded m where m.sink = r.target and m.id = e.id)
                        then 'discarded' end as reason
              from outbox.event e
             where e.id = any (r.ids) and e.id > low and e.id <= high and e.shard = any (wanted)
               and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                       r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots,
                                       r.a_nexts, r.b_snapshots, r.last_ids)
             order by e.id
             limit most_rows
          ) c;
    else
        select array_agg(c.id) filter (where c.reason is null), array_agg(c.id) filter (where c.reason is not null),
               array_agg(c.shard) filter (where c.reason is not null), array_agg(c.reason) filter (where c.reason is not null)
          into chosen, passed_ids, passed_shards, reasons
          from (
            select e.id, e.shard,
                   case when r.redirected then case when e.deliver_at is not null
                                                     then outbox.not_to_replay(e.uid, e.created_at, e.deliver_at) end
                        when (select true from outbox.delivery d where d.id = e.id and d.sink = r.target) then 'row'
                        when (select m.uid = e.uid from outbox.discarded m where m.sink = r.target and m.id = e.id)
                        then 'discarded' end as reason
              from outbox.event e
             where e.id > low and e.id <= high and e.shard = any (wanted)
               and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                       r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots,
                                       r.a_nexts, r.b_snapshots, r.last_ids)
             order by e.id
             limit most_rows
          ) c;
    end if;
    return query
    select w.id, w.shard, w.uid::text, w.type, case when w.fault is null or octet_length(w.key) <= 1024 then w.key end,
           case when w.fault is null then w.payload end, w.content_type, w.headers,
           case when w.fault is null or (w.deliver_at >= first_time and w.deliver_at < last_time) then w.deliver_at end,
           greatest(first_time, least(w.created_at, last_time - interval '1 second')), w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when f.fault is null or octet_length(f.key) <= 1024
                               then coalesce(octet_length(f.key), 0) else 0 end
                        + coalesce(octet_length(f.headers), 0))
                    over (order by f.id rows between unbounded preceding and 1 preceding) as before
          from (
            select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.deliver_at, e.created_at,
                   case when e.headers is not null and pg_column_size(e.headers) <= 262144 then e.headers::text end as headers,
                   outbox.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) as fault
              from outbox.event e
             where e.id = any (chosen)
             order by e.id offset 0
          ) f
      ) w
     where w.before < most_bytes or w.before is null
     order by w.id;
    get diagnostics returned = row_count;
    -- Of a read that was cut by its bytes, those before the last event that it returned.
    return query
    select p.id, p.shard, '', '', null::text, null::bytea, '', null::text, null::timestamptz, now(), p.reason
      from unnest(passed_ids, passed_shards, reasons) p (id, shard, reason)
     where returned = coalesce(cardinality(chosen), 0)
        or p.id < (select c.id from unnest(chosen) c (id) order by c.id offset returned - 1 limit 1)
     order by p.id;
end
$$;

-- The state of an event in each sink, as in version 15. A scheduled event that no sink has read yet is shown as it was changed.
create or replace function outbox.event_states(wanted uuid) returns table (sink text, state text, details jsonb)
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select s.sink, case when s.mended then 'settled' else s.state end,
           case when s.mended then '{}' else s.details end
           || case when s.delivered and s.details ? 'again' then jsonb_build_object('again', true) else '{}' end
           || case when s.replays is null then '{}' else jsonb_build_object('replays', s.replays) end
      from (
        select p.sink,
               case when c.uid is null or p.state not in ('pending', 'scheduled') then p.state
                    when c.deliver_at is null then 'discarded'
                    when c.deliver_at > now() then 'scheduled'
                    else p.state end as state,
               case when c.uid is null or p.state not in ('pending', 'scheduled') then p.details
                    when c.deliver_at is null
                    then jsonb_build_object('at', c.changed_at, 'by', null, 'role', c.emitter, 'reason', 'cancelled')
                    else p.details || jsonb_build_object('due_in_seconds',
                                                         outbox.in_seconds(outbox.loadable_time(c.deliver_at) - now())) end
                   as details,
               r.replays, r.delivered,
               coalesce(r.settled, false)
                   and (p.state in ('not routed', 'passed over')
                        or p.state = 'unknown' and p.details ->> 'reason' <> 'rebase needed') as mended
          from outbox.passage_states(wanted) p
          left join outbox.replay_outcomes(wanted) r on r.sink = p.sink
          left join outbox.scheduled_change c
            on c.uid = wanted
               and c.created_at = (select e.created_at from outbox.event e where e.uid = wanted order by e.id + 0 desc limit 1)
      ) s
$$;

-- As in version 15, with tenant and priority.
create or replace function outbox.why(wanted uuid) returns json
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    with known as (
        (select 1 as place, e.id, e.shard, e.type, e.key, e.tenant, e.priority, e.created_at
           from outbox.event e where e.uid = wanted order by e.id + 0 desc limit 1)
        union all
        (select 2, d.id, d.shard, d.type, d.key, null, null, d.created_at
           from outbox.delivery d where d.uid = wanted order by d.id desc limit 1)
        union all
        (select 3, m.id, null, null, null, null, null, null from outbox.discarded m
          where m.uid = wanted order by m.id desc limit 1)
        union all
        (select 4, a.id, null, null, null, null, null, null from outbox.attempt a
          where a.uid = wanted order by a.id desc limit 1)
    )
    select json_build_object(
               'uid', wanted, 'type', k.type, 'key', k.key, 'tenant', k.tenant, 'priority', k.priority, 'id', k.id,
               'shard', k.shard, 'in_log', k.place = 1,
               'created_at', k.created_at, 'age_seconds', outbox.in_seconds(now() - outbox.loadable_time(k.created_at)),
               'sinks', coalesce((select json_object_agg(s.sink, jsonb_build_object('state', s.state) || s.details
                                                         order by s.sink)
                                    from outbox.event_states(wanted) s), '{}'))
      from known k
     order by k.place
     limit 1
$$;
