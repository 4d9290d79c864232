-- One step of an erasure: the events with a key, or the one with a uid, lose payload, headers and key. `subject` is
-- {"key": "..."} or {"uid": "..."}. The first step returns a number, which the others are given. Call it until `phase` is
--
-- - refused: `undelivered` names up to 20 events that a relay may still deliver. Only if `done` is not 0, events that were
--   looked at before were erased.
-- - done: `matched` events were found, and `done` of them erased. `left_over` were committed since the look began, and are
--   as they were.
--
-- Then `archives` are those that may hold the events; `key_hash` is how their manifests list the key; `statistics` names
-- what the server keeps values in. With `dry_run` it only looks. A step looks at no more than `most_ids` ids.
--
-- The step that changes events locks the log, then the row of `meta`, for which every change of the configuration waits.
create or replace function outbox.erase(
    subject jsonb, actor text default null, reason text default null, dry_run boolean default false,
    most_ids integer default 100000, inout erasure_id bigint default null,
    out phase text, out place bigint, out upto_id bigint, out matched bigint, out done bigint, out left_over bigint,
    out undelivered jsonb, out archives jsonb, out key_hash text, out statistics text[]
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set lock_timeout = '2s'
set jit = off
as $$
#variable_conflict use_variable
declare
    key text;
    uid uuid;
    filter jsonb;
    only_look constant boolean := coalesce(dry_run, false);
    e outbox.erasure;
    next record;
begin
    perform outbox_internal.begin_action('outbox.erase'), outbox_internal.at_home();
    if jsonb_typeof(subject) is distinct from 'object' or (select count(*) from jsonb_object_keys(subject)) <> 1
       or not subject ?| '{key, uid}' then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'the subject of an erasure must be a JSON object with either "key" or "uid"';
    end if;
    key := subject ->> 'key';
    if jsonb_typeof(coalesce(subject -> 'key', subject -> 'uid')) <> 'string' or octet_length(key) > 1024
       or (subject ->> 'uid') collate "C" !~* '^[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}$' then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'key must be a string of at most 1024 bytes, and uid a UUID, as emit returns it';
    end if;
    uid := (subject ->> 'uid')::uuid;
    filter := case when key is not null then jsonb_build_object('key', key) else jsonb_build_object('uids', jsonb_build_array(uid)) end;
    if coalesce(trim(reason), '') = '' and not only_look then
        raise exception using errcode = 'invalid_parameter_value', message = 'an erasure needs a reason';
    end if;
    if erasure_id is null then
        perform outbox_internal.check_erasable(uid);
        delete from outbox.erasure o where o.began_at < clock_timestamp() - interval '1 day';
        insert into outbox.erasure (subject) values (outbox_internal.hashed_filter(filter, true)) returning id into erasure_id;
        e := outbox_internal.look_again(erasure_id);
    else
        select * into e from outbox.erasure o
         where o.id = erasure_id and o.role_name = outbox_internal.emitter() and o.login = session_user
           and o.subject = outbox_internal.hashed_filter(filter, true) and o.began_at > clock_timestamp() - interval '1 day'
           for update;
        if not found then
            raise exception using errcode = 'invalid_parameter_value',
                message = format('erasure_id %s is not the number of an erasure of today with this role and subject',
                                 erasure_id),
                hint = 'Leave erasure_id out to begin a new one.';
        end if;
    end if;
    if e.phase = 'erasing' then
        lock table outbox.event in row exclusive mode;
        perform from outbox.meta for share;
        perform set_config('synchronous_commit', 'on', true)
          where current_setting('synchronous_commit') in ('off', 'local');
    end if;
    if e.phase in ('looking', 'erasing') then
        if e.config <> (select m.config from outbox.meta m) or e.server <> outbox_internal.incarnation() then
            e := outbox_internal.look_again(e.id);
        end if;
        select * into next
          from outbox_internal.next_of_subject(key, uid, e.snapshot, e.place, e.upto_id,
                                      least(greatest(coalesce(most_ids, 100000), 1), 1000000));
        undelivered := outbox_internal.undelivered(key, uid, next.ids, e.place, next.next_id);
    end if;
    if undelivered is not null then
        e.phase := 'refused';
    elsif e.phase = 'looking' then
        update outbox.erasure o
           set place = case when next.next_id < o.upto_id then next.next_id else 0 end,
               phase = case when next.next_id < o.upto_id then 'looking' else 'erasing' end,
               matched = o.matched + cardinality(next.ids)
         where o.id = e.id returning o.* into e;
        e.phase := case when only_look and e.phase <> 'looking' then 'done' else e.phase end;
    elsif e.phase = 'erasing' then
        perform outbox_internal.change_events(e, key, uid, next.ids, next.later, next.next_id);
        update outbox.erasure o
           set place = next.next_id, phase = case when next.next_id < o.upto_id then 'erasing' else 'audit' end,
               audit_id = outbox_internal.record_action('erase', null, filter, o.done - e.done, actor, reason, o.audit_id)
         where o.id = e.id returning o.* into e;
    elsif e.phase = 'audit' then
        perform outbox_internal.erase_in_audit(key, actor);
        update outbox.erasure o set phase = 'sinks' where o.id = e.id returning o.* into e;
    else
        perform outbox_internal.erase_in_sinks(key, e.first_at);
        perform outbox_internal.renew_key_statistics();
        e.phase := 'done';
    end if;
    phase := e.phase;
    place := e.place;
    upto_id := e.upto_id;
    matched := e.matched;
    done := e.done;
    left_over := e.left_over;
    if phase in ('refused', 'done') then
        archives := outbox_internal.archives_of_subject(e.matched + e.done > 0, uid);
        key_hash := outbox_internal.keyed_hash(key);
        statistics := outbox_internal.content_statistics();
        delete from outbox.erasure o where o.id = e.id;
    end if;
end
$$;
comment on function outbox.erase is
    'One step of `erase`: remove payload, headers and key of events from the log and all tables. With dry_run it only '
    'looks. Recorded in outbox.audit.';

-- Refuse what would fail in the middle: a uid that nothing is known of; a publication of updates of tables that have no
-- replica identity, which PostgreSQL refuses to change then.
create or replace function outbox_internal.check_erasable(uid uuid) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    found_one text;
begin
    if uid is not null
       and outbox_internal.event_id(uid) is null
       and not exists (select from outbox.scheduled s where s.uid = check_erasable.uid)
       and not exists (select from outbox.delivery d where d.uid = check_erasable.uid)
       and not exists (select from outbox.attempt a where a.uid = check_erasable.uid)
       and not exists (select from outbox.discarded m where m.uid = check_erasable.uid) then
        raise exception using errcode = 'no_data_found', message = format('no event %s is known', uid);
    end if;
    select p.pubname into found_one
      from pg_publication p
      join pg_publication_tables t on t.pubname = p.pubname
      join outbox_internal.content_columns() n on n.part = format('%I.%I', t.schemaname, t.tablename)::regclass
      join pg_class c on c.oid = n.part
     where p.pubupdate and t.schemaname = 'outbox' and c.relreplident in ('d', 'n')
       and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary and c.relreplident = 'd')
     limit 1;
    if found_one is not null then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('publication %1$I publishes updates of the log, which has no replica identity: PostgreSQL would '
                             'refuse to erase an event; alter publication %1$I set (publish = ''insert'') leaves them out',
                             found_one);
    end if;
end
$$;

-- Change the events of an erasure with these ids, of which `later` others were left out. What was recorded of their attempts
-- and discards goes too, rows of sinks that no longer exist, and the unique keys of the events, which may name the subject.
create or replace function outbox_internal.change_events(
    e outbox.erasure, key text, uid uuid, ids bigint[], later bigint, upto_id bigint
) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    uids uuid[];
    parts regclass[];
    earliest timestamptz;
begin
    with husks as (
        update outbox.event v
           set payload = '', headers = null, key = null, content_type = 'application/x-erased'
         where v.id = any (ids) and (v.key = change_events.key or v.uid = change_events.uid)
        returning v.uid, v.tableoid::regclass as part, v.created_at
    )
    select array_agg(h.uid), array_agg(distinct h.part), min(h.created_at) into uids, parts, earliest from husks h;
    update outbox.erasure o
       set done = o.done + coalesce(cardinality(uids), 0), left_over = o.left_over + later,
           first_at = least(o.first_at, earliest)
     where o.id = e.id;
    uids := uids || change_events.uid;
    update outbox.attempt a set error = null, detail = null
     where a.uid = any (uids) and (a.error is not null or a.detail is not null);
    delete from outbox.unique_key k  -- in one order, as emits lock them
     where k.ctid = any (array(select l.ctid from outbox.unique_key l where l.uid = any (uids)
                                order by l.type, l.unique_key for update));
    update outbox.discarded m set reason = 'erased' where m.uid = any (uids) and m.reason <> 'erased';
    delete from outbox.delivery d
     where (d.uid = any (uids) or (d.id > e.place and d.id <= upto_id and d.key = change_events.key))
       and d.sink < '~' and not exists (select from outbox.sink k where k.name = d.sink);
    -- Archives of these partitions that were verified, or are being written, hold their events as they were: the days are
    -- checked and archived again. Each gets a row, so that a check that runs meanwhile either waits here and sees what was
    -- erased, or has its row changed. This comes last, since a day that is emptied waits for the rows.
    insert into outbox.day as d (day, part)
    select p.day, 1 + coalesce((select max(o.part) from outbox.day o where o.day = p.day), 0)
      from outbox_internal.partitions() p
     where p.part = any (parts)
     order by p.day
        on conflict (day) where emptied_at is null do update
       set checked_snapshot = null, archived_snapshot = null, archived_to = null, sha256 = null, events = null,
           unfinished = outbox_internal.with_archive(d.unfinished, d.archived_to);
end
$$;

-- The columns that hold what erase removes, of each table and partition.
create or replace function outbox_internal.content_columns() returns table (part oid, attnum smallint, name text)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select a.attrelid, a.attnum, format('%I.%I', c.relname, a.attname)
      from (values ('outbox.event'::regclass, '{key, payload, headers}'::name[]),
                   ('outbox.delivery', '{key, payload, headers, last_error, last_attempt}'),
                   ('outbox.attempt', '{error, detail}'), ('outbox.discarded', '{reason}'),
                   ('outbox.audit', '{filter, reason}'), ('outbox.sink', '{last_error, paused_reason}'),
                   ('outbox.replay', '{key, reason}')) t (root, names)
     cross join lateral (
        select t.root::oid as oid union all select i.inhrelid from pg_inherits i where i.inhparent = t.root) p
      join pg_class c on c.oid = p.oid
      join pg_attribute a on a.attrelid = p.oid and a.attname = any (t.names)
$$;

-- Columns of which the server's statistics hold such values: those that an owner asked to have analyzed, or that
-- another object depended on when the schema was upgraded; and an owner's own indexes and statistics on them. Those of
-- the keys of `delivery` are left out: erase renews them.
create or replace function outbox_internal.content_statistics() returns text[]
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select array_agg(distinct k.name order by k.name)
      from (
        select c.name
          from outbox_internal.content_columns() c
          join pg_class t on t.oid = c.part
          join pg_attribute a on a.attrelid = c.part and a.attnum = c.attnum
          join pg_stats s on s.schemaname = 'outbox' and s.tablename = t.relname and s.attname = a.attname
         where c.name <> 'delivery.key'
        union
        select format('%I', x.relname)
          from outbox_internal.content_columns() c
          join pg_depend d on d.classid = 'pg_class'::regclass and d.refobjid = c.part and d.refobjsubid = c.attnum
          join pg_index i on i.indexrelid = d.objid and i.indexprs is not null
          join pg_class x on x.oid = d.objid
        union
        select format('%I', e.stxname)
          from outbox_internal.content_columns() c
          join pg_depend d on d.classid = 'pg_statistic_ext'::regclass and d.refobjid = c.part and d.refobjsubid = c.attnum
          join pg_statistic_ext e on e.oid = d.objid
      ) k (name)
$$;

-- Replace a key by its hash where the audit says it as a word, which is of at least 4 characters. A row of the audit tells
-- which rows were changed. Nothing is changed for a key of which no event was erased. In the kind of an error, numbers of the
-- key are not as they were.
create or replace function outbox_internal.erase_in_audit(key text, by_actor text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    hash constant text := outbox_internal.keyed_hash(key);
    subject constant jsonb := jsonb_build_object('key', key);
    in_kind constant text := outbox_internal.error_kind(key);
    word constant text := '(?<![[:alnum:]_])' || regexp_replace(key collate "C", '([!-/:-@[-`{-~])', '\\\1', 'g')
                          || '(?![[:alnum:]_])';
    kind_word constant text := '(?<![[:alnum:]_])' || regexp_replace(in_kind collate "C", '([!-/:-@[-`{-~])', '\\\1', 'g')
                               || '(?![[:alnum:]_])';
    changed bigint[];
begin
    if length(key) < 4 or not exists (select from outbox.audit a
                                       where a.action = 'erase' and a.filter = outbox_internal.hashed_filter(subject, true) and a.count > 0) then
        return;
    end if;
    with quoting as (
        update outbox.audit a
           set reason = regexp_replace(a.reason collate "C", word, hash, 'g'),
               filter = a.filter
                        || case when a.filter ? 'error'
                                then jsonb_build_object('error', regexp_replace((a.filter ->> 'error') collate "C",
                                                                                word, hash, 'g'))
                                else '{}' end
                        || case when a.filter ? 'kind' and length(in_kind) >= 4
                                then jsonb_build_object('kind', regexp_replace((a.filter ->> 'kind') collate "C",
                                                                               kind_word, hash, 'g'))
                                else '{}' end
         where (strpos(a.reason, key) > 0 and a.reason collate "C" ~ word)
            or (strpos(a.filter ->> 'error', key) > 0 and (a.filter ->> 'error') collate "C" ~ word)
            or (length(in_kind) >= 4 and strpos(a.filter ->> 'kind', in_kind) > 0
                and (a.filter ->> 'kind') collate "C" ~ kind_word)
        returning a.id
    )
    select array_agg(q.id order by q.id) into changed from quoting q;
    if changed is not null then
        perform outbox_internal.record_action('erase in audit', null, subject || jsonb_build_object('rows', to_jsonb(changed[1:100])),
                                     cardinality(changed), by_actor, null);
    end if;
end
$$;

-- Last errors of sinks since the first erased event go: they may quote an answer. Where another one, or the reason of a
-- pause or replay, says a key of at least 4 characters, the key is replaced by its hash, and so is the key of a replay that
-- has ended. In a transaction of its own: relays wait for the rows, and what holds the row of `meta` must not wait for sinks.
create or replace function outbox_internal.erase_in_sinks(key text, since timestamptz) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
    perform from outbox.sink k order by k.name for no key update;  -- in the order of relays that start
    update outbox.sink k set last_error = null
     where k.last_error_at >= since and k.last_error not like 'client: %';
    update outbox.sink k
       set last_error = replace(k.last_error, key, outbox_internal.keyed_hash(key)),
           paused_reason = replace(k.paused_reason, key, outbox_internal.keyed_hash(key))
     where length(key) >= 4 and (strpos(k.last_error, key) > 0 or strpos(k.paused_reason, key) > 0);
    update outbox.replay r set key = outbox_internal.keyed_hash(key) where r.key = erase_in_sinks.key and r.cleared;
    update outbox.replay r set reason = replace(r.reason, key, outbox_internal.keyed_hash(key))
     where length(key) >= 4 and strpos(r.reason, key) > 0;
end
$$;

-- Begin an erasure, or begin its look again.
create or replace function outbox_internal.look_again(erasure_id bigint) returns outbox.erasure
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    config_now constant bigint := (select m.config from outbox.meta m);
    snap constant pg_snapshot := pg_current_snapshot();  -- after the counter, and before the last id
    e outbox.erasure;
begin
    -- No scheduled event enters the log until this commits: the first step looks whether one of the subject waits.
    lock table outbox.secret in exclusive mode;
    update outbox.erasure o
       set phase = 'looking', place = 0, matched = 0, left_over = 0, config = config_now, snapshot = snap,
           server = outbox_internal.incarnation(),
           upto_id = greatest(pg_sequence_last_value('outbox.event_id_seq'), (select max(d.id) from outbox.delivery d), 0)
     where o.id = erasure_id
    returning o.* into e;
    return e;
end
$$;

-- The next events that an erasure looks at or changes: ids behind `after_id`, at most `most_ids` of them, and at most 200
-- events, or 8 MiB. `next_id` is the last id that was looked at. Ids that neither an event nor a delivery has are passed
-- over. Events that were committed since `snapshot` are left out, and `later` counts them: those above the floor, since
-- nothing was added to the others, which carry numbers of another server.
create or replace function outbox_internal.next_of_subject(
    key text, uid uuid, snapshot pg_snapshot, after_id bigint, upto_id bigint, most_ids integer,
    out ids bigint[], out next_id bigint, out later bigint
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    most constant integer := 200;
    most_bytes constant bigint := 8388608;
    wanted_shard constant smallint := outbox_internal.shard_of(key, '00000000-0000-0000-0000-000000000000');
    numbering_floor constant bigint := (select m.floor from outbox.meta m);
    low bigint := after_id;
    last_id bigint;
begin
    next_id := upto_id;
    if uid is null then
        low := least((select min(e.id) from outbox.event e where e.id > after_id),
                     (select min(d.id) from outbox.delivery d where d.id > after_id)) - 1;
        next_id := least(coalesce(low + most_ids, upto_id), upto_id);
    end if;
    select array_agg(f.id order by f.id) filter (where f.shown), count(*) filter (where not f.shown),
           case when bool_or(f.is_last) then max(f.id) end
      into ids, later, last_id
      from (
        select c.id, c.id <= numbering_floor or pg_visible_in_snapshot(c.xid, snapshot) as shown,
               c.n = most or c.bytes >= most_bytes as is_last
          from (
            select r.id, r.xid, row_number() over (order by r.id) as n, sum(r.size) over (order by r.id) as bytes,
                   sum(r.size) over (order by r.id) - r.size as before
              from (
                (select e.id, e.xid, coalesce(pg_column_size(e.payload), 0) as size
                   from outbox.event e
                  where uid is null and e.id > low and e.id <= next_id and e.shard = wanted_shard
                    and e.key = next_of_subject.key
                  order by e.id limit most)
                union all
                (select e.id, e.xid, coalesce(pg_column_size(e.payload), 0)
                   from outbox.event e
                  -- The uid of an event may have been used again for another.
                  where e.id = any (array[outbox_internal.id_in(next_of_subject.uid),
                                          (select u.id from outbox.uid u where u.uid = next_of_subject.uid)])
                    and e.uid = next_of_subject.uid and e.id > low and e.id <= next_id
                    and not outbox_internal.is_erased(e.content_type, e.payload)
                  order by e.id limit most)
              ) r
          ) c
         where c.n = 1 or c.before < most_bytes
      ) f;
    ids := coalesce(ids, '{}');
    next_id := coalesce(last_id, next_id);
end
$$;

-- Events that a relay may still deliver, as JSON; null if there are none. Those with these ids that have a row of a sink or
-- replay, in any state; those that the position of a sink has not passed, if it takes their type, or if its shard has an owner,
-- which may deliver by earlier patterns; and those that a replay means and has not passed, until it has ended and no relay
-- serves it. A shard with an owner counts only as far as that owner has written its position: the next one begins where any
-- has. And copies with the key whose events the log no longer has, of ids behind `low`, up to `high`; or copies of the uid; and
-- with the first ids, scheduled events. Of each kind at most 20 are named.
--
-- One statement, and so one snapshot: a settlement turns an unpassed event into one with a row.
-- Of reserved types, a sink without an owner takes those that it has the pattern for.
create or replace function outbox_internal.undelivered(key text, uid uuid, event_ids bigint[], low bigint, high bigint) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with looked_at as materialized (
        select e.id, e.xid, e.uid, e.shard, e.type, e.key, e.content_type, e.created_at, e.tenant
          from outbox.event e where e.id = any (event_ids)
    ),
    readers as materialized (
        select k.name, l.shard, h.owner is not null as owned, outbox_internal.types_of(k.name) as types, m.floor, p.a_seq, p.a_snapshot,
               p.a_next, p.b_snapshot, p.last_id, p.a_seq is not null and (h.owner is null or p.epoch = h.epoch) as counts
          from outbox.sink k
         cross join outbox.meta m
         cross join (select distinct l.shard from looked_at l) l
          left join outbox.shard h on h.sink = k.name and h.shard = l.shard
          left join outbox.standing p on p.sink = k.name and p.shard = l.shard
    ),
    events as (
        select d.uid, d.sink::text, d.state
          from looked_at l join outbox.delivery d on d.uid = l.uid
         where d.sink >= '~' or exists (select from outbox.sink k where k.name = d.sink)
        union
        select l.uid, r.name::text, 'pending'
          from looked_at l
          join readers r on r.shard = l.shard
         where (r.owned
                or (r.types is null or l.type like any (r.types)) and (l.type not like 'outbox.%' or 'outbox.%' = any (r.types)))
           and not (r.counts and outbox_internal.position_passed(l.id, l.xid, r.a_seq, r.a_snapshot, r.a_next, r.b_snapshot, r.last_id,
                                                        r.floor))
           and not exists (select from outbox.delivery d where d.uid = l.uid and d.sink = r.name)
        union
        select l.uid, '~' || r.id, 'pending'
          from looked_at l
          join outbox.replay r on not r.cleared and r.from_id < l.id and r.upto_id >= l.id
         where (r.ids is null or l.id = any (r.ids))
           and outbox_internal.replay_means(l.id, l.xid, l.shard, l.type, l.key, l.content_type, l.created_at, r.type_like, r.routed,
                                   r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts, r.b_snapshots,
                                   r.last_ids)
           and (r.tenant is null or l.tenant = r.tenant)
           and not exists (select from outbox_internal.replay_places(r.id) p where p.shard = l.shard and p.last_id >= l.id)
         limit 20
    )
    select jsonb_agg(jsonb_build_object('uid', u.uid, 'sink', u.sink, 'state', u.state) order by u.uid, u.sink)
      from (
        select n.uid, n.sink, n.state from events n
        union
        (select d.uid, d.sink::text, d.state
           from outbox.delivery d
          where undelivered.uid is null and d.id > low and d.id <= high and d.key = undelivered.key
            and not exists (select from outbox.event e
                             where e.id = any (array[d.id, (select u.id from outbox.uid u where u.uid = d.uid)])
                               and e.uid = d.uid and e.created_at = d.created_at)
            and (d.sink >= '~' or exists (select from outbox.sink k where k.name = d.sink))
          limit 20)
        union
        (select d.uid, d.sink::text, d.state
           from outbox.delivery d
          where d.uid = undelivered.uid
            and (d.sink >= '~' or exists (select from outbox.sink k where k.name = d.sink))
          limit 20)
        union
        (select s.uid, '', 'scheduled'
           from outbox.scheduled s
          where low = 0 and (s.uid = undelivered.uid or undelivered.uid is null and s.key = undelivered.key)
          limit 20)
      ) u
$$;

-- Renew the statistics of the keys of `delivery`, if there are any. ANALYZE keeps them as they are if there is no row, so
-- it is shown one that is gone before any other session can see it, and that is no dead letter, of which a notice would tell.
create or replace function outbox_internal.renew_key_statistics() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if exists (select from pg_stats s
                where s.schemaname = 'outbox' and s.tablename = 'delivery' and s.attname = 'key') then
        insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at)
        values ('', 0, 0, 'held', false, 'infinity', '00000000-0000-0000-0000-000000000000', '', '', now());
        execute 'analyze outbox.delivery (key)';
        delete from outbox.delivery d where d.sink = '' and d.id = 0;
    end if;
end
$$;
