-- The relay's own events, called notices, of types `outbox.*`: for the sink that has this pattern, and for no other. Relays
-- made for version 2 work on this schema. They deliver no notice, and notices are made of their changes too.

-- ---------------------------------------------------------------------------------------------------------
-- Reserved types
-- ---------------------------------------------------------------------------------------------------------

-- A type that begins with `outbox.` matches a pattern that begins so too, and no other: not `*`, not `*.dead`. Functions that
-- take `types`, patterns for LIKE, compare with the one that such a pattern becomes, `outbox.%`, once in each call.

-- As in version 2. Reserved types are not usual.
create or replace function outbox.is_usual(
    type text, payload bytea, key text, headers jsonb, deliver_at timestamptz, content_type text
) returns boolean
language sql stable
return headers is null and deliver_at is null
       and octet_length(type) <= 255 and not type ^@ 'outbox.' and type collate "C" ~ '^[\x21-\x29\x2b-\x7e]+$'
       and octet_length(payload) <= outbox.payload_ceiling()
       and coalesce(current_setting('outbox.max_payload_bytes', true), '') = ''
       and (key is null or octet_length(key) <= 1024)
       and content_type in ('application/json', 'application/octet-stream');

-- As in version 9, and reserved types are refused.
create or replace function outbox.event_fault(
    type text, payload bytea, key text, headers jsonb, deliver_at timestamptz, content_type text, most text
) returns text
language sql stable
return 'outbox.emit: ' || coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', '') || case
    when type is null or length(type) not between 1 and 255 then
        format('type must be 1 to 255 visible ASCII characters without space and "*"; this one has %s',
               coalesce(length(type)::text || ' characters', 'no value'))
    when type collate "C" ~ '[^\x21-\x29\x2b-\x7e]' then
        format('type must be 1 to 255 visible ASCII characters without space and "*"; %s',
               outbox.shown(type, '[^\x21-\x29\x2b-\x7e]'))
    when type ^@ 'outbox.' then
        format('type %s is reserved: types that begin with "outbox." are the relay''s own', type)
    when payload is null then
        'payload must not be null'
    when most is not null and (length(most) > 9 or most collate "C" ~ '[^0-9]') then
        'the setting outbox.max_payload_bytes must be a number of bytes, below 1000000000'
    when octet_length(payload) > outbox.payload_ceiling() then
        format('payload must have at most %s bytes (the ceiling: see outbox-relay migrate --max-payload-bytes); '
               'this one has %s', outbox.payload_ceiling(), octet_length(payload))
    when octet_length(payload) > most::integer then
        format('payload must have at most %s bytes (setting outbox.max_payload_bytes); this one has %s',
               most, octet_length(payload))
    when octet_length(key) > 1024 then
        format('key must have at most 1024 bytes; this one has %s', octet_length(key))
    when content_type is null or length(content_type) not between 1 and 255 then
        format('content_type must be 1 to 255 printable ASCII characters; this one has %s',
               coalesce(length(content_type)::text || ' characters', 'no value'))
    when content_type collate "C" ~ '[^\x20-\x7e]' then
        format('content_type must be 1 to 255 printable ASCII characters; %s',
               outbox.shown(content_type, '[^\x20-\x7e]'))
    when lower(content_type) = 'application/x-erased' then
        'content_type application/x-erased stands for erased events, and no other event has it'
    when deliver_at not between '0001-01-01 00:00:00+00' and '9998-12-31 23:59:59.999999+00' then
        format('deliver_at must be in the years 1 to 9998 (UTC); this one is %s', deliver_at)
    when headers is not null then
        outbox.header_fault(headers)
end;

-- As in version 9, without reserved types unless they are asked for.
create or replace function outbox.read_rest(
    shards smallint[], types text[], a pg_snapshot, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint, most_payload bigint default null
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
)
language plpgsql stable rows 1000
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_sort = off
set enable_incremental_sort = off
set enable_bitmapscan = off
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    ceiling constant bigint := case when most_payload is not null then least(most_payload, outbox.payload_ceiling()) end;
    notices constant boolean := coalesce('outbox.%' = any (types), false);
begin
    return query
    select w.id, w.shard, w.uid::text, w.type,
           case when w.fault is null or octet_length(w.key) <= 1024 then w.key end,
           case when w.fault is null then w.payload end, w.content_type, w.headers,
           case when w.fault is null
                  or (w.deliver_at >= '0001-01-01 00:00:00+00' and w.deliver_at < '9999-01-01 00:00:00+00')
                then w.deliver_at end,
           case when ceiling is null
                  or (w.created_at >= '0001-01-01 00:00:00+00' and w.created_at < '9999-01-01 00:00:00+00')
                then w.created_at
                else least(greatest(w.created_at, '0001-01-01 00:00:00+00'), '9998-12-31 00:00:00+00') end,
           w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when ceiling is null then 0
                               else case when f.fault is null or octet_length(f.key) <= 1024
                                         then coalesce(octet_length(f.key), 0) else 0 end
                                    + coalesce(octet_length(f.headers), 0) end)
                    over (order by f.id rows between unbounded preceding and 1 preceding) as before
          from (
            -- A level of its own (offset 0), so that only what is returned is looked at, and no partition's plan does it.
            select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.deliver_at, e.created_at,
                   case when e.headers is null then null
                        when ceiling is null or pg_column_size(e.headers) <= 262144 then e.headers::text end as headers,
                   outbox.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) as fault
              from (
                select l.id, l.shard, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at,
                       l.created_at
                  from outbox.event l
                 where l.id > after_id and l.id <= upto_id and l.shard = any (shards)
                   and (types is null or l.type like any (types)) and (notices or l.type not like 'outbox.%')
                   and not outbox.is_erased(l.content_type, l.payload)
                   and pg_visible_in_snapshot(l.xid, b) and not pg_visible_in_snapshot(l.xid, a)
                 order by l.id
                 limit most_rows
              ) e
            order by e.id offset 0
          ) f
      ) w
     where w.before < most_bytes or w.before is null;
end
$$;

-- As in version 9, without reserved types unless they are asked for.
create or replace function outbox.read_late(
    shards smallint[], types text[], a pg_snapshot, a_next bigint, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint, most_payload bigint default null
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
)
language plpgsql stable rows 100
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set max_parallel_workers_per_gather = 0
as $$
#variable_conflict use_column
declare
    no_limit constant bigint := 9223372036854775807;
    few constant integer := 32;
    close_together constant integer := 25;
    ceiling constant bigint := case when most_payload is not null then least(most_payload, outbox.payload_ceiling()) end;
    notices constant boolean := coalesce('outbox.%' = any (types), false);
    above constant bigint := pg_snapshot_xmax(a)::text::bigint;
    b_xmax constant bigint := pg_snapshot_xmax(b)::text::bigint;
    below constant bigint := least(a_next, b_xmax);
    most_looks constant bigint := 5 * most_rows::bigint;
    late xid8[] := array(select x from pg_snapshot_xip(a) x where pg_visible_in_snapshot(x, b));
    still bigint[];
    each bigint;
    looks bigint;
    last_id bigint := upto_id;
    from_id bigint := after_id;
    steps constant integer := 8;
    wanted boolean := true;
begin
    if below - above between 1 and few then
        late := late || array(
            select x::text::xid8 from generate_series(above, below - 1) x where pg_visible_in_snapshot(x::text::xid8, b)
        );
    elsif below > above then
        still := array(
            select x::text::bigint from pg_snapshot_xip(b) x where x::text::bigint between above and below - 1 order by 1
        );
        late := late || array(
            select f.xid from unnest(above - 1 || still, still || below) g (low, high)
             cross join lateral (
                with recursive found (xid) as (
                    select (select l.xid from outbox.event l
                             where l.xid > g.low::text::xid8 and l.xid < g.high::text::xid8 order by l.xid limit 1)
                    union all
                    select (select l.xid from outbox.event l
                             where l.xid > f.xid and l.xid < g.high::text::xid8 order by l.xid limit 1)
                      from found f where f.xid is not null
                )
                select f.xid from found f where f.xid is not null
             ) f
        );
    end if;
    if cardinality(late) = 0 then
        return;
    end if;
    if ceiling is not null then
        select count(*), min(r.id) - 1, max(r.id) into looks, after_id, last_id
          from (
            select l.id from outbox.event l
             where l.xid = any (late) and l.id + 0 > after_id and l.id + 0 <= upto_id
             limit most_looks + 1
          ) r;
        if looks = 0 then
            return;
        end if;
        if looks > most_looks then
            -- The next ids of each transaction, up to where those of one end first: there are no others before.
            each := greatest(most_looks / cardinality(late), 1);
            for step in 1..steps loop
                select min(f.first_id) - 1, coalesce(min(f.last_id), upto_id), coalesce(bool_or(f.wanted), false)
                  into after_id, last_id, wanted
                  from unnest(late) x (xid)
                 cross join lateral (
                    select min(i.id) as first_id, case when count(*) = each then max(i.id) end as last_id,
                           bool_or(types is null or i.type like any (types)) as wanted
                      from (
                        select l.id, l.type from outbox.event l
                         where l.xid = x.xid and l.id + 0 > from_id and l.id + 0 <= upto_id
                         order by l.id + 0
                         limit each
                      ) i
                 ) f;
                exit when wanted or last_id >= upto_id;
                from_id := last_id;
            end loop;
        end if;
    end if;
    if not wanted then
        null;  -- only how far it got
    elsif looks is not null and b_xmax < no_limit and last_id - after_id <= close_together * least(looks, most_looks) then
        return query
        select * from outbox.read_rest(shards, types, a, b, after_id, last_id, most_rows, most_bytes, most_payload);
    else
    return query
    select w.id, w.shard, w.uid::text, w.type,
           case when w.fault is null or octet_length(w.key) <= 1024 then w.key end,
           case when w.fault is null then w.payload end, w.content_type, w.headers,
           case when w.fault is null
                  or (w.deliver_at >= '0001-01-01 00:00:00+00' and w.deliver_at < '9999-01-01 00:00:00+00')
                then w.deliver_at end,
           case when ceiling is null
                  or (w.created_at >= '0001-01-01 00:00:00+00' and w.created_at < '9999-01-01 00:00:00+00')
                then w.created_at
                else least(greatest(w.created_at, '0001-01-01 00:00:00+00'), '9998-12-31 00:00:00+00') end,
           w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when ceiling is null then 0
                               else case when f.fault is null or octet_length(f.key) <= 1024
                                         then coalesce(octet_length(f.key), 0) else 0 end
                                    + coalesce(octet_length(f.headers), 0) end)
                    over (order by f.id rows between unbounded preceding and 1 preceding) as before
          from (
            -- A level of its own (offset 0), so that only what is returned is looked at, and no partition's plan does it.
            select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.deliver_at, e.created_at,
                   case when e.headers is null then null
                        when ceiling is null or pg_column_size(e.headers) <= 262144 then e.headers::text end as headers,
                   outbox.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) as fault
              from (
                select l.id, l.shard, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at,
                       l.created_at
                  from outbox.event l
                 where l.xid = any (late) and l.id + 0 > after_id and l.id + 0 <= last_id
                   and (l.shard + 0) = any (shards) and (types is null or l.type like any (types))
                   and (notices or l.type not like 'outbox.%') and not outbox.is_erased(l.content_type, l.payload)
                 order by l.id + 0
                 limit most_rows
              ) e
            order by e.id offset 0
          ) f
      ) w
     where w.before < most_bytes or w.before is null
     order by w.id;
    end if;
    if looks > most_looks and last_id < upto_id then
        return query
        select last_id, -1::smallint, ''::text, ''::text, null::text, null::bytea, ''::text, null::text,
               null::timestamptz, '2000-01-01 00:00:00+00'::timestamptz, null::text;
    end if;
end
$$;

-- The patterns of a sink for LIKE; null if one of them matches every type that is not reserved, and no other is needed.
create or replace function outbox.types_of(sink_name text) returns text[]
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when not '*' = any (k.patterns) or 'outbox.*' = any (k.patterns) then array(
               select replace(regexp_replace(p, '([\\%_])', '\\\1', 'g'), '*', '%') from unnest(k.patterns) p) end
      from outbox.sink k where k.name = sink_name
$$;

-- True if one of the patterns matches an event type: "*" is any number of characters, of types that are not reserved.
create or replace function outbox.type_matches(patterns text[], event_type text) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
    select coalesce(bool_or(event_type collate "C"
                            like replace(regexp_replace(p collate "C", '([\\%_])', '\\\1', 'g'), '*', '%')
                            and (not event_type ^@ 'outbox.' or p ^@ 'outbox.')), false)
      from unnest(patterns) p
$$;

-- As in version 8, without reserved types unless the sink has them.
create or replace function outbox.replay_means(
    id bigint, xid xid8, shard smallint, type text, key text, content_type text, created_at timestamptz,
    type_like text, routed text[], wanted_key text, since timestamptz, until timestamptz, floor bigint,
    a_seqs bigint[], a_snapshots pg_snapshot[], a_nexts bigint[], b_snapshots pg_snapshot[], last_ids bigint[]
) returns boolean
language sql stable
return (type_like is null or type like type_like)
   and (routed is null or type like any (routed))
   and (type not like 'outbox.%' or 'outbox.%' = any (routed))
   and (wanted_key is null or key = wanted_key)
   and (since is null or created_at >= since)
   and (until is null or created_at < until)
   and content_type <> 'application/x-erased'
   and outbox.position_passed(id, xid, a_seqs[shard + 1], a_snapshots[shard + 1], a_nexts[shard + 1], b_snapshots[shard + 1],
                              last_ids[shard + 1], floor);

-- As in version 8. To another sink, notices are replayed only if that one receives them.
create or replace function outbox.plan_replay(
    filter jsonb, to_sink text, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint
) returns outbox.replay
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := clock_timestamp();
    f outbox.delivery_filter;
    r outbox.replay;
    newest bigint;
    beyond bigint;
    wrong text;
begin
    if jsonb_typeof(filter) = 'object' then
        select n.name into wrong from jsonb_object_keys(filter) n (name)
         where n.name <> all ('{sink, type, key, since, until, uids}'::text[]) limit 1;
    end if;
    if wrong is not null then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('the filter of a replay has no field "%s"; it has: sink, type, key, since, until, uids',
                             left(wrong, 60));
    end if;
    f := outbox.read_filter(filter, at);
    if f.sink is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'a replay needs a sink';
    end if;
    if f.since is null and f.key is null and f.uids is null then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'a replay needs since, key or uids: to deliver everything again, seek the sink to the beginning';
    end if;
    if f.until > at then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('until lies in the future: it is %s, and the database''s clock says %s', f.until, at);
    end if;
    if to_sink is not null then
        perform outbox.require_sink(to_sink);
    end if;
    perform outbox.require_days(f.since);
    r.sink := f.sink;
    r.target := coalesce(to_sink, f.sink);
    r.redirected := to_sink is not null;
    r.type_pattern := filter ->> 'type';
    r.type_like := f.type_like;
    r.routed := outbox.types_of(f.sink);
    if r.redirected and not 'outbox.%' = any (coalesce(outbox.types_of(to_sink), '{}')) then
        r.routed := array_remove(r.routed, 'outbox.%');
    end if;
    r.key := f.key;
    r.since := f.since;
    r.until := f.until;
    r.uids := f.uids;
    r.floor := (select m.floor from outbox.meta m);
    if r.redirected then
        r.a_seqs := array_fill(tick_seq, array[64]);
        r.a_snapshots := array_fill(tick_snapshot, array[64]);
        r.a_nexts := array_fill(tick_next, array[64]);
        r.b_snapshots := array_fill(null::pg_snapshot, array[64]);
        r.last_ids := array_fill(0::bigint, array[64]);
    else
        r := outbox.place_replay(r);
    end if;
    newest := coalesce((select max(e.id) from outbox.event e), 0);
    if f.uids is not null then
        r.ids := array(select e.id from outbox.event e where e.uid = any (f.uids) order by e.id);
        r.from_id := coalesce(r.ids[1] - 1, newest);
        r.upto_id := greatest(r.from_id, coalesce(r.ids[cardinality(r.ids)], newest));
    else
        r.from_id := coalesce(case when f.since is null then (select min(e.id) from outbox.event e)
                                   else outbox.first_id_since(f.since, 5) end - 1, newest);
        if f.until is not null then
            beyond := outbox.id_behind(f.until);
        end if;
        r.upto_id := greatest(r.from_id, least(newest, beyond));
    end if;
    r.counted_upto := r.from_id;
    return r;
end
$$;

-- As in version 9. Of reserved types, a sink without an owner takes those that it has the pattern for.
create or replace function outbox.undelivered(event_ids bigint[], most integer default 20)
returns table (uid uuid, sink text, state text)
language sql stable rows 20
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
    with looked_at as materialized (
        select e.id, e.xid, e.uid, e.shard, e.type, e.key, e.content_type, e.created_at, e.deliver_at
          from outbox.event e where e.id = any (event_ids)
    ),
    readers as materialized (
        select k.name, l.shard, h.owner is not null as owned, outbox.types_of(k.name) as types, m.floor, p.a_seq, p.a_snapshot,
               p.a_next, p.b_snapshot, p.last_id, p.a_seq is not null and (h.owner is null or p.epoch = h.epoch) as counts
          from outbox.sink k
         cross join outbox.meta m
         cross join (select distinct l.shard from looked_at l) l
          left join outbox.shard h on h.sink = k.name and h.shard = l.shard
          left join outbox.standing p on p.sink = k.name and p.shard = l.shard
    )
    select d.uid, d.sink::text, outbox.delivery_state(d.state, d.ordered, d.deliver_at)
      from looked_at l join outbox.delivery d on d.uid = l.uid
     where d.sink >= '~' or exists (select from outbox.sink k where k.name = d.sink)
    union
    select l.uid, r.name::text, case when l.deliver_at > now() then 'scheduled' else 'pending' end
      from looked_at l
      join readers r on r.shard = l.shard
     where (r.owned
            or (r.types is null or l.type like any (r.types)) and (l.type not like 'outbox.%' or 'outbox.%' = any (r.types)))
       and not (r.counts and outbox.position_passed(l.id, l.xid, r.a_seq, r.a_snapshot, r.a_next, r.b_snapshot, r.last_id,
                                                    r.floor))
       and not exists (select from outbox.delivery d where d.uid = l.uid and d.sink = r.name)
    union
    select l.uid, '~' || r.id, 'pending'
      from looked_at l
      join outbox.replay r on not r.cleared and r.from_id < l.id and r.upto_id >= l.id
     where (r.ids is null or l.id = any (r.ids))
       and outbox.replay_means(l.id, l.xid, l.shard, l.type, l.key, l.content_type, l.created_at, r.type_like, r.routed,
                               r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts, r.b_snapshots,
                               r.last_ids)
       and not exists (select from outbox.replay_places(r.id) p where p.shard = l.shard and p.last_id >= l.id)
     limit most
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Notices
-- ---------------------------------------------------------------------------------------------------------

-- The time of the last notice of each type and cause: at most one is made in an hour. Of the notices that a sink is paused
-- or lags, and that it has recovered, the newer one is the last that was made of it. `sink` is '' if a cause has no sink.
create table outbox.notice (
    type text collate "C" not null,
    sink text collate "C" not null,
    cause text collate "C" not null,
    at timestamptz not null default clock_timestamp(),
    primary key (type, sink, cause)
);

-- The sink that receives notices, or null: then none is made.
create function outbox.notify_sink() returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select k.name from outbox.sink k where 'outbox.*' = any (k.patterns) order by k.generation desc, k.name limit 1
$$;

-- Return whether a notice may be made now. One with a later time than now does not count: the clock has gone back.
create function outbox.notice_due(notice_type text, subject text, notice_cause text) returns boolean
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select not exists (
        select from outbox.notice n
         where n.type = notice_type and n.sink = subject and n.cause = notice_cause
           and n.at > clock_timestamp() - interval '1 hour' and n.at < clock_timestamp() + interval '1 minute')
$$;

-- Make a notice in the transaction of what it tells, unless one of its cause was made within the hour; return whether it was
-- made. It never fails that transaction: an error becomes a warning, and no further notice is tried in the transaction.
--
-- The short lock_timeout ends waits for another transaction that makes the same notice, before they become deadlocks.
create function outbox.make_notice(notice_type text, subject text, notice_cause text, details jsonb) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
as $$
declare
    made_at constant timestamptz := clock_timestamp();
    uid constant uuid := outbox.uuid7();
    key constant text := nullif(subject, '');
    made boolean;
begin
    if current_setting('outbox.notices_failed', true) = 'on' then
        return false;
    end if;
    begin
        insert into outbox.notice as n (type, sink, cause, at) values (notice_type, subject, notice_cause, made_at)
            on conflict (type, sink, cause) do update set at = excluded.at
                  where n.at <= excluded.at - interval '1 hour' or n.at >= excluded.at + interval '1 minute';
        made := found;
        if made then
            insert into outbox.event (shard, uid, type, key, payload, content_type, emitter)
            values (outbox.shard_of(key, uid), uid, notice_type, key,
                    convert_to((jsonb_build_object('at', made_at) || jsonb_strip_nulls(details))::text, 'UTF8'),
                    'application/json', outbox.emitter());
            delete from outbox.notice n
             where (n.type, n.sink, n.cause) in (
                select o.type, o.sink, o.cause from outbox.notice o
                 where o.type in ('outbox.dead', 'outbox.retention.blocked') and o.at < made_at - interval '1 day'
                 limit 100 for update skip locked);
        end if;
        return made;
    exception
        when others then
            perform set_config('outbox.notices_failed', 'on', true);
            raise warning 'a notice of type % was not written: %', notice_type, sqlerrm;
            return false;
    end;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Dead letters
-- ---------------------------------------------------------------------------------------------------------

-- The class of the error of a dead row: the code of its last attempt, its status, or `refused`. It has no text of a
-- destination.
create function outbox.error_class(last_attempt jsonb, last_status integer) returns text
language sql immutable
return coalesce(substring(last_attempt ->> 'code' from '^[A-Za-z0-9_]{1,60}$'),
                'status ' || last_status, 'refused');

-- Make the notice of dead letters of a sink. `count` are those of this class that died since the last notice of it, in the
-- last hour if there is none; `dead` are all of the sink. Both are counted in the newest thousand dead rows.
create function outbox.notify_dead() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_sort = off
set jit = off
as $$
declare
    most constant integer := 1000;
    receiver constant text := outbox.notify_sink();
    target text;
    class text;
    counted_since timestamptz;
    counted record;
begin
    if receiver is null then
        return null;
    end if;
    target := outbox.sink_of(new.sink);
    class := outbox.error_class(new.last_attempt, new.last_status);
    if target = receiver or not outbox.notice_due('outbox.dead', target, class) then
        return null;
    end if;
    counted_since := coalesce((select n.at from outbox.notice n
                                where n.type = 'outbox.dead' and n.sink = target and n.cause = class),
                              clock_timestamp() - interval '1 hour');
    select count(*) as dead,
           count(*) filter (where d.since >= counted_since
                              and outbox.error_class(d.last_attempt, d.last_status) = class) as recent
      into counted
      from (select o.since, o.last_attempt, o.last_status
              from outbox.delivery o
             where o.sink = new.sink and o.state = 'dead'
             order by o.id desc limit most) d;
    perform outbox.make_notice('outbox.dead', target, class, jsonb_build_object(
        'sink', target, 'reason', class, 'status', new.last_status, 'count', counted.recent, 'dead', counted.dead,
        'exact', counted.dead < most, 'uid', new.uid, 'type', new.type, 'replay', outbox.replay_of(new.sink)));
    return null;
end
$$;

-- Only dead rows call the function. A dead letter that a replay gives to its target died before.
create trigger notify_new_dead after insert on outbox.delivery
for each row when (new.state = 'dead') execute function outbox.notify_dead();
create trigger notify_dead after update of state on outbox.delivery
for each row when (old.state <> 'dead' and new.state = 'dead') execute function outbox.notify_dead();

-- ---------------------------------------------------------------------------------------------------------
-- Sinks
-- ---------------------------------------------------------------------------------------------------------

-- Make the notice that a sink is paused or lags (`cause`), or that it has recovered, unless the last one said the same. A
-- state that lasts gets its notice by a later call if the hour suppresses it now.
create function outbox.notify_state(subject text, state_cause text, bad boolean, details jsonb) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    receiver constant text := outbox.notify_sink();
    bad_type constant text := 'outbox.sink.' || state_cause;
    good_type constant text := 'outbox.sink.recovered';
    bad_at timestamptz;
    good_at timestamptz;
    told boolean;
begin
    if receiver is null or receiver = subject then
        return;
    end if;
    select max(n.at) filter (where n.type = bad_type), max(n.at) filter (where n.type = good_type)
      into bad_at, good_at
      from outbox.notice n
     where n.sink = subject and n.cause = state_cause and n.type in (bad_type, good_type);
    told := coalesce(bad_at > coalesce(good_at, '-infinity'), false);
    if bad and not told and outbox.notice_due(bad_type, subject, state_cause) then
        perform outbox.make_notice(bad_type, subject, state_cause, jsonb_build_object('sink', subject) || details);
    elsif not bad and told and outbox.notice_due(good_type, subject, state_cause) then
        perform outbox.make_notice(good_type, subject, state_cause, jsonb_build_object(
            'sink', subject, 'from', state_cause, 'since', date_trunc('second', bad_at),
            'seconds', round(extract(epoch from clock_timestamp() - bad_at)), 'actor', details -> 'actor'));
    end if;
end
$$;

-- Record every pause and resumption, as in version 3, and tell of it.
create or replace function outbox.sink_paused() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    actor constant text := nullif(current_setting('outbox.actor', true), '');
    reason constant text := coalesce(nullif(current_setting('outbox.reason', true), ''), new.paused_reason);
begin
    perform outbox.record_action(case when new.paused then 'pause' else 'resume' end, new.name, null, 1, actor,
                                 outbox.short_text(reason, 2000));
    perform outbox.notify_state(new.name, 'paused', new.paused, jsonb_build_object(
        'reason', outbox.short_text(reason, 500), 'actor', actor, 'role', outbox.emitter()));
    return null;
end
$$;

-- Return the lag of a sink, in seconds: the age of the first event behind its hindmost position, or of the oldest of the
-- thousand waiting rows that are due next, since it became due if its event was scheduled; 0 if there is none.
--
-- Positions of idle shards are brought forward every few seconds, so a sink that is served is behind by as much as its
-- delivery is. While few events fail they become rows, and the position moves on.
create function outbox.sink_lag(sink_name text) returns double precision
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    most constant integer := 1000;
    place constant bigint := (
        select min(case when s.b_seq is null then s.a_seq else greatest(s.a_seq, s.last_id) end)
          from outbox.standing s where s.sink = sink_name);
    unread constant timestamptz := (select e.created_at from outbox.event e where e.id > place order by e.id limit 1);
    parked constant timestamptz := (
        select min(greatest(r.created_at, r.deliver_at))
          from (select d.created_at, d.deliver_at from outbox.delivery d
                 where d.sink = sink_name and d.state = 'waiting'
                 order by d.due_at, d.id limit most) r
         where r.deliver_at is null or r.deliver_at <= now());
begin
    return coalesce(greatest(extract(epoch from clock_timestamp() - outbox.loadable_time(least(unread, parked))), 0), 0);
end
$$;

-- Tell which sinks lag by `lagging_seconds` or more, and which have recovered: they lag by less than half of it. Tell also
-- of pauses that the hour suppressed. Return the lag of every sink. A paused sink is judged once it is resumed.
create function outbox.notify_sinks(lagging_seconds double precision)
returns table (sink text, seconds double precision, paused boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    k record;
begin
    if (lagging_seconds between 1 and 1e9) is not true then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('lagging_seconds must be 1 to 1000000000, not %s', coalesce(lagging_seconds::text, 'null'));
    end if;
    for k in
        select s.name, s.paused, s.paused_reason, s.circuit, outbox.sink_lag(s.name) as lag
          from outbox.sink s order by s.name
    loop
        perform outbox.notify_state(k.name, 'paused', k.paused, jsonb_build_object(
            'reason', outbox.short_text(k.paused_reason, 500)));
        if not k.paused and (k.lag >= lagging_seconds or k.lag < lagging_seconds / 2) then
            perform outbox.notify_state(k.name, 'lagging', k.lag >= lagging_seconds, jsonb_build_object(
                'lag_seconds', round(k.lag::numeric, 1), 'lagging_seconds', lagging_seconds, 'circuit', k.circuit));
        end if;
        sink := k.name;
        seconds := k.lag;
        paused := k.paused;
        return next;
    end loop;
end
$$;

-- Forget the notices of a removed sink: another one of its name has none.
create function outbox.notices_deleted() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from outbox.notice n where n.sink = any (array(select r.name from removed r));
    return null;
end
$$;

create trigger notices_deleted after delete on outbox.sink
referencing old table as removed
for each statement execute function outbox.notices_deleted();

-- Move replays, and the times of notices, from a sink to its new name.
create or replace function outbox.follow_rename(old_name text, new_name text) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    update outbox.replay r
       set sink = case when r.sink = old_name then new_name else r.sink end,
           target = case when r.target = old_name then new_name else r.target end
     where old_name in (r.sink, r.target);
    delete from outbox.notice n where n.sink = new_name;
    update outbox.notice n set sink = new_name where n.sink = old_name;
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Retention
-- ---------------------------------------------------------------------------------------------------------

-- Make the notice of a day that is kept past keep_days. The same keepers are one cause, whatever the day. If the receiver of
-- notices keeps it alone, it is not told.
create function outbox.notify_blocked(day date, kept_by jsonb) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    receiver constant text := outbox.notify_sink();
    cause constant text := left(array_to_string(outbox.keeper_names(kept_by), ', '), 500);
begin
    if receiver is null or cause in ('', 'sink ' || receiver)
       or not outbox.notice_due('outbox.retention.blocked', '', cause) then
        return;
    end if;
    perform outbox.make_notice('outbox.retention.blocked', '', cause, jsonb_build_object(
        'day', case when day = '-infinity' then 'default' else day::text end,
        'kept_by', (select jsonb_agg(jsonb_build_object('kind', m.one -> 'kind', 'name', m.one -> 'name',
                                                        'since', m.one -> 'since') order by m.place)
                      from jsonb_array_elements(kept_by) with ordinality m (one, place) where m.place <= 20)));
end
$$;

-- As in version 6, and a notice is made if the keepers of the day have changed.
create or replace function outbox.check_day(
    day date, lease bigint, out kept_by jsonb, out changed boolean, out archived boolean, out writing_to text
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    snap pg_snapshot;
    config_now bigint;
    due record;
    c outbox.day;
begin
    perform outbox.require_day(day), outbox.at_home();
    select d.before, d.part into due from outbox.past_days(check_day.day) d;
    if due is null then
        kept_by := '[]';
        changed := false;
        archived := false;
        return;
    end if;
    config_now := (select m.config from outbox.meta m);
    snap := pg_current_snapshot();
    kept_by := outbox.day_keepers(day, due.before);
    select * into c from outbox.day d where d.day = check_day.day and d.emptied_at is null;
    kept_by := outbox.kept_since(kept_by, coalesce(c.kept_by, '[]'));
    changed := outbox.keeper_names(kept_by) <> outbox.keeper_names(coalesce(c.kept_by, '[]'));
    archived := c.archived_to is not null and c.archived_on = outbox.incarnation()
                and c.archived_before >= due.before and not outbox.came_since(due.part, c.archived_snapshot);
    writing_to := c.writing_to;
    if lease is null then
        return;
    end if;
    perform outbox.renew_retention(lease);
    insert into outbox.day as d (day, part, kept_by)
    select check_day.day, 1 + coalesce((select max(o.part) from outbox.day o where o.day = check_day.day), 0), kept_by
     where c.day is null
        on conflict do nothing;  -- an erasure made it meanwhile
    update outbox.day d
       set kept_by = check_day.kept_by,
           checked_snapshot = case when check_day.kept_by = '[]' then snap end,
           checked_config = config_now, checked_on = outbox.incarnation(), checked_before = due.before,
           deleted_at = null, deleted_id = null,
           archived_to = case when archived then d.archived_to end, sha256 = case when archived then d.sha256 end,
           events = case when archived then d.events end,
           archived_snapshot = case when archived then d.archived_snapshot end
     where d.day = check_day.day and d.emptied_at is null;
    if changed and kept_by <> '[]' then
        perform outbox.notify_blocked(check_day.day, kept_by);
    end if;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Events that are there
-- ---------------------------------------------------------------------------------------------------------

-- Adopted outbox tables of Debezium's emit whatever type a row has.
do $do$
begin
    if to_regprocedure('outbox.debezium_type(text, text)') is not null then
        execute $create$
            create or replace function outbox.debezium_type(row_type text, route text) returns text
            language plpgsql immutable
            as $body$
            declare
                -- Types that begin with "outbox." are the relay's own.
                found constant text := regexp_replace(
                    left(coalesce(nullif(row_type, ''), nullif(route, ''), '_'), 255), '^outbox\.', 'outbox_');
            begin
                if found collate "C" !~ '[^\x21-\x29\x2b-\x7e]' then
                    return found;
                end if;
                return regexp_replace(found collate "C", '[^\x21-\x29\x2b-\x7e]', '_', 'g');
            end
            $body$;
        $create$;
    end if;
    if exists (
        select from (select e.type from outbox.event e order by e.id desc limit 10000) n where n.type ^@ 'outbox.'
    ) then
        raise warning 'the newest events have types that begin with "outbox.", which are reserved now: the pattern "*" does '
                      'not match them any more, and emit refuses them';
    end if;
end
$do$;
