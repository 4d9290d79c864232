-- Replays of the events of one tenant. Relays of earlier versions serve them too: the functions that read the events of a
-- replay select them.

alter table outbox.replay add column tenant text collate "C";
comment on column outbox.replay.tenant is 'Only events of this tenant are meant; null: those of all.';

-- As in version 8, with the tenant.
create or replace function outbox.count_matches(
    r outbox.replay, after_id bigint, most bigint, most_seconds double precision, out events bigint, out upto bigint
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    step constant bigint := 50000;
    until_time constant timestamptz := clock_timestamp() + most_seconds * interval '1 second';
    shards constant smallint[] := outbox.replay_shards(r.key);
    high bigint;
    found_now bigint;
begin
    events := 0;
    upto := greatest(after_id, r.from_id);
    if r.ids is not null then
        select count(*) into events
          from outbox.event e
         where e.id = any (r.ids) and e.id > upto and e.id <= r.upto_id
           and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like, r.routed,
                                   r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts,
                                   r.b_snapshots, r.last_ids)
           and (r.tenant is null or e.tenant = r.tenant);
        upto := r.upto_id;
    end if;
    while upto < r.upto_id and events <= most loop
        high := least(upto + step, r.upto_id);
        select count(*) into found_now
          from outbox.event e
         where e.id > upto and e.id <= high and e.shard = any (shards)
           and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like, r.routed,
                                   r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts,
                                   r.b_snapshots, r.last_ids)
           and (r.tenant is null or e.tenant = r.tenant);
        events := events + found_now;
        upto := high;
        exit when clock_timestamp() > until_time;
    end loop;
end
$$;

-- As in version 8, with the tenant: for relays of versions 8 to 13.
create or replace function outbox.read_replay(
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
begin
    if r.floor is distinct from (select m.floor from outbox.meta m) then
        raise exception using errcode = 'serialization_failure',
            message = format('replay %s has not adopted the last rebase yet', replay_id);
    end if;
    if r.ids is not null then
        chosen := array(
            select e.id from outbox.event e
             where e.id = any (r.ids) and e.id > low and e.id <= high and e.shard = any (wanted)
               and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                       r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots,
                                       r.a_nexts, r.b_snapshots, r.last_ids)
               and (r.tenant is null or e.tenant = r.tenant)
               and (r.redirected
                       and (e.deliver_at is null or e.deliver_at <= now())
                    or not r.redirected
                       and (select true from outbox.delivery d where d.id = e.id and d.sink = r.target) is null
                       and (select m.uid = e.uid from outbox.discarded m where m.sink = r.target and m.id = e.id) is not true)
             order by e.id
             limit most_rows);
    else
        chosen := array(
            select e.id from outbox.event e
             where e.id > low and e.id <= high and e.shard = any (wanted)
               and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                       r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots,
                                       r.a_nexts, r.b_snapshots, r.last_ids)
               and (r.tenant is null or e.tenant = r.tenant)
               and (r.redirected
                       and (e.deliver_at is null or e.deliver_at <= now())
                    or not r.redirected
                       and (select true from outbox.delivery d where d.id = e.id and d.sink = r.target) is null
                       and (select m.uid = e.uid from outbox.discarded m where m.sink = r.target and m.id = e.id) is not true)
             order by e.id
             limit most_rows);
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
end
$$;

-- As in version 21, with the tenant.
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
               and (r.tenant is null or e.tenant = r.tenant)
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
               and (r.tenant is null or e.tenant = r.tenant)
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

-- As in version 15, with the tenant.
create or replace function outbox.replay_outcomes(wanted uuid)
returns table (sink text, replays jsonb, delivered boolean, settled boolean)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select n.target,
           jsonb_agg(jsonb_strip_nulls(jsonb_build_object('id', n.id, 'state', n.state, 'outcome', n.outcome,
                                                          'reason', n.reason)) order by n.id) filter (where n.place <= 20),
           bool_or(n.outcome = 'delivered'), bool_or(n.settled)
      from (
        select m.id, m.target, m.state, o.outcome, o.reason, o.settled, row_number() over (order by m.id desc) as place
          from (
            select r.id, r.target, r.state, r as replay, e.id as event_id, e.shard, e.uid
              from (select e.* from outbox.event e where e.uid = wanted order by e.id + 0 desc limit 1) e
              join outbox.replay r
                on r.from_id < e.id and r.upto_id >= e.id and (r.ids is null or e.id = any (r.ids)) and not r.target_gone
                   and r.floor = (select m.floor from outbox.meta m)
                   and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                           r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts,
                                           r.b_snapshots, r.last_ids)
                   and (r.tenant is null or e.tenant = r.tenant)
             order by r.id desc
             limit 1000
          ) m
         cross join lateral outbox.replay_outcome(m.replay, m.event_id, m.shard, m.uid) o
      ) n
     group by n.target
$$;

-- As in version 12, with the tenant of a replay.
create or replace function outbox.undelivered(event_ids bigint[], most integer default 20)
returns table (uid uuid, sink text, state text)
language sql stable rows 20
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
    with looked_at as materialized (
        select e.id, e.xid, e.uid, e.shard, e.type, e.key, e.content_type, e.created_at, e.deliver_at, e.tenant
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
       and (r.tenant is null or l.tenant = r.tenant)
       and not exists (select from outbox.replay_places(r.id) p where p.shard = l.shard and p.last_id >= l.id)
     limit most
$$;

-- As in version 12, with the tenant.
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
         where n.name <> all ('{sink, type, key, tenant, since, until, uids}'::text[]) limit 1;
    end if;
    if wrong is not null then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('the filter of a replay has no field "%s"; it has: %s', left(wrong, 60),
                             'sink, type, key, tenant, since, until, uids');
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
    r.tenant := f.tenant;
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

-- As in version 8, with the tenant.
create or replace function outbox.start_replay(
    filter jsonb, to_sink text, rate integer, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint,
    tick_incarnation text, tick_generations bigint, actor text, reason text, out id bigint, out paused boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
#variable_conflict use_variable
declare
    most constant integer := 100;
    r outbox.replay;
    fence bigint;
begin
    perform outbox.end_when_idle();
    perform outbox.require_read_committed('outbox.start_replay');
    if rate not between 1 and 1000000 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('rate must be 1 to 1000000 events per second, not %s', rate);
    end if;
    lock table outbox.event in access share mode;  -- before the sinks, as outbox.rebase locks them
    r := outbox.plan_replay(filter, to_sink, tick_seq, tick_snapshot, tick_next);
    lock table outbox.sink in share row exclusive mode;
    perform outbox.require_sink(r.sink), outbox.require_sink(r.target);
    perform outbox.check_action_tick(tick_seq, tick_snapshot, tick_next, tick_incarnation, tick_generations);
    if (select count(*) from outbox.replay p where not p.cleared) >= most then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s replays have not ended, and there may be no more: cancel some of them', most);
    end if;
    fence := outbox.raise_config() << 32;
    insert into outbox.replay (
        sink, target, redirected, type_pattern, type_like, routed, key, tenant, since, until, uids, ids, from_id, upto_id, floor,
        a_seqs, a_snapshots, a_nexts, b_snapshots, last_ids, counted_upto, rate, actor, reason
    )
    values (
        r.sink, r.target, r.redirected, r.type_pattern, r.type_like, r.routed, r.key, r.tenant, r.since, r.until, r.uids,
        r.ids, r.from_id, r.upto_id, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts, r.b_snapshots, r.last_ids, r.from_id, rate,
        actor, reason
    )
    returning replay.id into id;
    insert into outbox.shard (sink, shard, epoch) select '~' || id, n, fence from generate_series(0, 63) n;
    insert into outbox.replay_progress (replay, shards, last_ids, seen)
    select id, array(select generate_series(0, 63)), array_fill(r.from_id, array[64]), 0;
    if rate is not null then
        insert into outbox.replay_rate (replay, rate, tokens) values (id, rate, 0);
    end if;
    paused := (select k.paused from outbox.sink k where k.name = r.target);
    perform outbox.record_action('replay start', r.sink,
                                 filter || jsonb_strip_nulls(jsonb_build_object('replay', id, 'to', to_sink, 'rate', rate)),
                                 1, actor, reason);
end
$$;

drop function outbox.replays(bigint, boolean, integer);

-- As in version 15, with the tenant.
create function outbox.replays(wanted bigint default null, unfinished boolean default false, most integer default 100)
returns table (
    id bigint, sink text, target text, redirected boolean, state text, type text, key text, since timestamptz,
    until timestamptz, uids integer, rate integer, total bigint, total_exact boolean, delivered bigint, failed bigint,
    waiting bigint, dropped bigint, passed_by bigint, created_at timestamptz, ended_at timestamptz, actor text, role_name text,
    reason text, target_paused boolean, relays integer, shards_left integer, tenant text
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select r.id, r.sink, r.target, r.redirected, r.state, r.type_pattern, r.key, outbox.loadable_time(r.since),
           outbox.loadable_time(r.until), cardinality(r.uids), r.rate,
           greatest(r.counted, n.delivered + n.failed + coalesce(b.passed_by, 0)),
           r.counted_upto >= r.upto_id, n.delivered, n.failed, n.waiting, r.dropped,
           coalesce(b.passed_by, case when r.state = 'done' then greatest(r.counted - n.delivered - n.failed, 0) end),
           r.created_at, r.ended_at, r.actor, r.role_name, r.reason,
           (select k.paused from outbox.sink k where k.name = r.target),
           (select count(*)::integer from outbox.relay w
             where w.seen_at > clock_timestamp() - interval '45 seconds' and '~' || r.id = any (w.sinks)),
           case when r.cleared then 0
                else 64 - (select count(*)::integer from outbox.replay_places(r.id) p where p.last_id >= r.upto_id) end,
           r.tenant
      from (
        select p.* from outbox.replay p
         where (wanted is null or p.id = wanted) and (not unfinished or p.state in ('running', 'paused'))
         order by p.id desc limit least(greatest(coalesce(most, 100), 0), 1000)
      ) r
     cross join lateral (
        select count(*) filter (where d.state = 'dead') as dead, count(*) filter (where d.state <> 'dead') as waiting
          from outbox.delivery d join outbox.replay_places(r.id) p on p.shard = d.shard and d.id <= p.last_id
         where d.sink = '~' || r.id
     ) d
     cross join lateral (
        select outbox.replay_delivered(r) as delivered, r.failed + d.dead as failed, d.waiting
     ) n
     cross join lateral (select outbox.replay_passed_by(r) as passed_by) b
     order by r.id desc
$$;
