-- Replays: events that a sink has passed are delivered again, by a filter, in the order of their keys. A replay is shared by
-- relays as a sink is, by shards, positions and rows of its own, under the name `~ID`. It is no row of outbox.sink, so no
-- list of sinks has it. Relays made for version 2 work on this schema, and serve no replay.

-- Shards belong to sinks and to replays. outbox.sink_deleted deletes those of a sink.
alter table outbox.shard drop constraint shard_sink_fkey;

alter table outbox.delivery add column replay bigint;
comment on column outbox.delivery.replay is 'The replay that left this dead letter.';

-- The position of the target at the start is kept in arrays of 64, by shard: an event that it had not passed then is not
-- the replay's. `floor` is the one that they belong to: after a rebase outbox.tend_replay takes the target's position as it
-- then is. `failed` counts the dead letters that were given to the target, `dropped` the rows of a cancelled replay that
-- were not delivered. `seen` is the sum of the ledger once that is deleted. Of rows only those count that the position of
-- their shard has passed: the others are not in `seen` either, since they are read again after a crash.
create table outbox.replay (
    id bigint primary key generated always as identity,
    sink text collate "C" not null,
    target text collate "C" not null,
    target_gone boolean not null default false,
    redirected boolean not null,
    state text not null default 'running' check (state in ('running', 'paused', 'done', 'cancelled')),
    type_pattern text collate "C",
    type_like text collate "C",
    routed text[],
    key text collate "C",
    since timestamptz,
    until timestamptz,
    uids uuid[],
    ids bigint[],
    from_id bigint not null,
    upto_id bigint not null,
    floor bigint not null,
    a_seqs bigint[] not null,
    a_snapshots pg_snapshot[] not null,
    a_nexts bigint[] not null,
    b_snapshots pg_snapshot[] not null,
    last_ids bigint[] not null,
    counted_upto bigint not null,
    counted bigint not null default 0,
    failed bigint not null default 0,
    dropped bigint not null default 0,
    seen bigint not null default 0,
    cleared boolean not null default false,
    rate integer check (rate > 0),
    created_at timestamptz not null default clock_timestamp(),
    ended_at timestamptz,
    role_name text not null default outbox.emitter(),
    actor text,
    reason text
);
comment on column outbox.replay.target_gone is
    'The target was removed: its name may be that of another sink by now, which gets no dead letter.';
comment on column outbox.replay.cleared is 'Its shards, positions and rows are deleted, and its counts are final.';
create index replay_uncleared on outbox.replay (id) where not cleared;

-- Positions, appended only behind the fence of outbox.settle_replay: of a shard the highest counts. `seen` is the number
-- of events that were settled since the row before, delivered or made rows.
create table outbox.replay_progress (
    replay bigint not null references outbox.replay (id) on delete cascade,
    seq bigint generated always as identity,
    shards smallint[] not null,
    last_ids bigint[] not null,
    seen bigint not null,
    primary key (replay, seq)
);

-- The rate of a replay across all relays: `tokens` events may be read now, and `rate` more each second.
create table outbox.replay_rate (
    replay bigint primary key references outbox.replay (id) on delete cascade,
    rate integer not null,
    tokens double precision not null,
    at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- The number of a replay by its internal name; null for the name of a sink.
create function outbox.replay_of(name text) returns bigint
language sql immutable
return case when name collate "C" ~ '^~[0-9]{1,18}$' then substr(name, 2)::bigint end;

-- The sink to which events of a sink or a replay go.
create function outbox.sink_of(name text) returns text
language sql stable
return coalesce((select r.target from outbox.replay r where r.id = outbox.replay_of(name)), name);

-- The detail of a recorded attempt, with the replay that made it.
create function outbox.attempt_detail(name text, detail jsonb) returns jsonb
language sql immutable
return case when outbox.replay_of(name) is null then detail
            else coalesce(detail, '{}') || jsonb_build_object('replay', outbox.replay_of(name)) end;

-- As in version 1; of a replay, whether the destination of its target is known to be down.
create or replace function outbox.known_down(sink_name text) returns boolean
language sql stable
return exists (
    select from outbox.sink k
     where k.name = outbox.sink_of(sink_name) and k.circuit <> 'closed'
       and k.last_error_at > clock_timestamp() - interval '90 seconds'
);

-- ---------------------------------------------------------------------------------------------------------
-- Which events are meant
-- ---------------------------------------------------------------------------------------------------------

-- True if an event is one that a replay means: the same condition for reading, counting and previews. One expression,
-- which takes the place of its call when a statement is planned.
create function outbox.replay_means(
    id bigint, xid xid8, shard smallint, type text, key text, content_type text, created_at timestamptz,
    type_like text, routed text[], wanted_key text, since timestamptz, until timestamptz, floor bigint,
    a_seqs bigint[], a_snapshots pg_snapshot[], a_nexts bigint[], b_snapshots pg_snapshot[], last_ids bigint[]
) returns boolean
language sql stable
return (type_like is null or type like type_like)
   and (routed is null or type like any (routed))
   and (wanted_key is null or key = wanted_key)
   and (since is null or created_at >= since)
   and (until is null or created_at < until)
   and content_type <> 'application/x-erased'
   and outbox.position_passed(id, xid, a_seqs[shard + 1], a_snapshots[shard + 1], a_nexts[shard + 1], b_snapshots[shard + 1],
                              last_ids[shard + 1], floor);

-- The shards in which a replay has events.
create function outbox.replay_shards(key text) returns smallint[]
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select case when key is null then array(select n::smallint from generate_series(0, 63) n)
                else array[(hashtextextended(key collate "C", 0) & 63)::smallint] end
$$;

-- The number of events that a replay means, of ids in (after_id, upto_id], up to `most` and for about `most_seconds`;
-- `upto` is how far it was counted.
create function outbox.count_matches(
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
                                   r.b_snapshots, r.last_ids);
        upto := r.upto_id;
    end if;
    while upto < r.upto_id and events <= most loop
        high := least(upto + step, r.upto_id);
        select count(*) into found_now
          from outbox.event e
         where e.id > upto and e.id <= high and e.shard = any (shards)
           and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like, r.routed,
                                   r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts,
                                   r.b_snapshots, r.last_ids);
        events := events + found_now;
        upto := high;
        exit when clock_timestamp() > until_time;
    end loop;
end
$$;

-- The next events of a replay behind `after_id` up to `upto_id`, in id order, as outbox.read_rest returns them. Without
-- --to, an event that has a row of the target, or was discarded there, is left out; with it, one that is not due.
create function outbox.read_replay(
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

-- ---------------------------------------------------------------------------------------------------------
-- Start
-- ---------------------------------------------------------------------------------------------------------

-- Refuse a range that begins before the end of a day that was emptied: the log does not have it any more. The day of an
-- event is found by the partitions that are left; a day that held nothing is none.
create function outbox.require_days(since timestamptz) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
as $$
declare
    oldest timestamptz;
begin
    select max(coalesce(p.upto, d.next_day, d.day + 1)) into oldest
      from (
        select o.day, lead(o.day) over (order by o.day) as next_day, o.emptied_at, o.events
          from (select d.day, max(d.emptied_at) as emptied_at, sum(d.events) as events
                  from outbox.day d where d.day <> '-infinity' group by d.day) o
      ) d
      left join outbox.partitions() p on p.day = d.day
     where d.emptied_at is not null and coalesce(d.events, 1) > 0;
    oldest := greatest(oldest, (select max(d.checked_before) from outbox.day d
                                 where d.day = '-infinity' and d.emptied_at is not null and coalesce(d.events, 1) > 0));
    if since < oldest then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('the log no longer has all events since %s: the oldest day that it has is %s',
                             outbox.loadable_time(since), oldest::date),
            hint = format('Begin at %s or later; older events are in the archive, if there is one.', oldest::date);
    end if;
end
$$;

-- An id behind all events that were emitted before a time, with the margin of outbox.first_id_since; null if there is none.
create function outbox.id_behind(until timestamptz) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    margin constant interval := '10 minutes';
    margin_ids constant bigint := 20000;
    low bigint := (select min(e.id) from outbox.event e) - 1;
    high bigint := (select max(e.id) from outbox.event e);
    middle bigint;
    at timestamptz;
begin
    while high - low > margin_ids loop
        middle := low + (high - low) / 2;
        select e.created_at into at from outbox.event e where e.id > middle order by e.id limit 1;
        if at > until + margin then
            high := middle;
        else
            low := middle;
        end if;
    end loop;
    return high + margin_ids;
end
$$;

-- The target's position by shard as a replay keeps it. A shard without a position has passed nothing.
create function outbox.place_replay(r outbox.replay) returns outbox.replay
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    select array_agg(coalesce(s.a_seq, 0) order by n.shard), array_agg(coalesce(s.a_snapshot, '3:3:') order by n.shard),
           array_agg(coalesce(s.a_next, 3) order by n.shard), array_agg(s.b_snapshot order by n.shard),
           array_agg(coalesce(s.last_id, 0) order by n.shard)
      into r.a_seqs, r.a_snapshots, r.a_nexts, r.b_snapshots, r.last_ids
      from generate_series(0, 63) n (shard)
      left join outbox.standing s on s.sink = r.target and s.shard = n.shard;
    return r;
end
$$;

-- Plan a replay: `filter` is that of outbox.read_filter with sink, type, key, since, until and uids. With `to_sink` it goes
-- to that sink. The tick was taken before, in a transaction of its own: places are looked up after it, so an event with a
-- lower id that is committed between the two is none of the replay's.
create function outbox.plan_replay(
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

-- The events that a replay would deliver, without a start: the number of events that its filter means, counted up to
-- `most` and for some seconds; the uids that the log does not have; the oldest event that it has, if the range has no
-- beginning; and whether the target is paused, and how many live relays serve it.
create function outbox.preview_replay(
    filter jsonb, to_sink text, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint, most integer,
    most_seconds double precision, alive_seconds double precision,
    out matched bigint, out exact boolean, out unknown text[], out oldest timestamptz, out paused boolean,
    out relays integer
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
declare
    r outbox.replay;
    limited constant integer := outbox.bounded_count(most);
    counted record;
begin
    lock table outbox.event in access share mode;
    r := outbox.plan_replay(filter, to_sink, tick_seq, tick_snapshot, tick_next);
    select * into counted from outbox.count_matches(r, r.from_id, limited, outbox.bounded_seconds(most_seconds));
    matched := least(counted.events, limited);
    exact := counted.events <= limited and counted.upto >= r.upto_id;
    unknown := array(select u.uid::text from unnest(r.uids) u (uid)
                      where not exists (select from outbox.event e where e.uid = u.uid) order by 1);
    if r.since is null and r.uids is null then
        oldest := outbox.loadable_time((select e.created_at from outbox.event e order by e.id limit 1));
    end if;
    paused := (select k.paused from outbox.sink k where k.name = r.target);
    relays := (select count(*) from outbox.relay w
                where w.seen_at > clock_timestamp() - outbox.alive_interval(alive_seconds) and r.target = any (w.sinks)
                  and w.config is not null);  -- relays made for version 2 serve no replay
end
$$;

-- Start a replay and return its number. The counter of configurations is raised, by which a day that was checked before is
-- checked again before it is emptied.
create function outbox.start_replay(
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
        sink, target, redirected, type_pattern, type_like, routed, key, since, until, uids, ids, from_id, upto_id, floor,
        a_seqs, a_snapshots, a_nexts, b_snapshots, last_ids, counted_upto, rate, actor, reason
    )
    values (
        r.sink, r.target, r.redirected, r.type_pattern, r.type_like, r.routed, r.key, r.since, r.until, r.uids, r.ids,
        r.from_id, r.upto_id, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts, r.b_snapshots, r.last_ids, r.from_id, rate,
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

-- ---------------------------------------------------------------------------------------------------------
-- Settlement and rate
-- ---------------------------------------------------------------------------------------------------------

-- One settlement of a replay, as outbox.settle, except that positions need the fence too: what they add to `seen` is
-- counted once. Returns false, and has written nothing, when the fence fails.
create function outbox.settle_replay(
    replay_id bigint, owner_id uuid, shards smallint[], epochs bigint[], last_ids bigint[], seen bigint,
    ids bigint[], states text[], ordereds boolean[], due_in double precision[], attempt_counts integer[],
    claim_counts integer[], leases uuid[], lease_for double precision[], errors text[], statuses integer[],
    last_attempts text[], fence_shards smallint[], fence_epochs bigint[]
) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_variable
declare
    name constant text := '~' || replay_id;
    mine integer;
    wanted integer;
begin
    select count(*) into mine from (
        select 1
          from (select distinct f.shard, f.epoch
                  from unnest(shards || fence_shards, epochs || fence_epochs) f (shard, epoch)) f
          join outbox.shard s on s.sink = name and s.shard = f.shard and s.epoch = f.epoch and s.owner = owner_id
         order by s.shard
           for share of s
    ) locked;
    select count(*) into wanted
      from (select distinct f.shard, f.epoch from unnest(shards || fence_shards, epochs || fence_epochs) f (shard, epoch)) f;
    if mine <> wanted then
        return false;
    end if;
    if cardinality(ids) > 0 and not outbox.settle(
        name, owner_id, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', ids, states, ordereds, due_in,
        attempt_counts, claim_counts, leases, lease_for, errors, statuses, last_attempts, fence_shards, fence_epochs
    ) then
        return false;
    end if;
    if cardinality(shards) > 0 then
        insert into outbox.replay_progress (replay, shards, last_ids, seen) values (replay_id, shards, last_ids, seen);
    end if;
    return true;
end
$$;

-- Pay for the events that were read of a replay, and return how many may be read now: less than 1 means to wait for
-- that many at the rate of the replay. At most the events of one second are saved up.
create function outbox.spend_replay(replay_id bigint, spent integer) returns double precision
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    update outbox.replay_rate r
       set tokens = least(greatest(r.rate, 1), r.tokens
                              + r.rate * greatest(0, extract(epoch from clock_timestamp() - r.at)::double precision)) - spent,
           at = clock_timestamp()
     where r.replay = replay_id
    returning r.tokens
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Looking after replays
-- ---------------------------------------------------------------------------------------------------------

-- The last id that is settled of each shard of a replay.
create function outbox.replay_places(replay_id bigint) returns table (shard smallint, last_id bigint)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select u.shard, max(u.last_id)
      from outbox.replay_progress p cross join lateral unnest(p.shards, p.last_ids) u (shard, last_id)
     where p.replay = replay_id
     group by u.shard
$$;

-- The number of rows of a replay that its positions have passed.
create function outbox.replay_rows(replay_id bigint) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select count(*)
      from outbox.delivery d join outbox.replay_places(replay_id) p on p.shard = d.shard
     where d.sink = '~' || replay_id and d.id <= p.last_id
$$;

-- Give up to `most` dead letters of a replay to its target, and return how many there were: only those that the replay's
-- position has passed, so that none is read again, and the target's, which would take such a row for one of its own first
-- delivery. Where the target has a row of the event, that one stays. They take part in no order: no live event waits
-- behind them.
create function outbox.move_dead(r outbox.replay, most integer) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    name constant text := '~' || r.id;
    floor_now constant bigint := (select m.floor from outbox.meta m);
    dead bigint[];
begin
    -- Each query is small next to the rows: a replay whose dead letters wait for the target has no others to look at.
    dead := array(
        select d.id
          from (select o.id, o.shard from outbox.delivery o where o.sink = name and o.state = 'dead' order by o.id limit most) d
          join outbox.replay_places(r.id) p on p.shard = d.shard and d.id <= p.last_id
          left join lateral (select e.id, e.xid from outbox.event e where e.id = d.id limit 1) e on true
         where e.id is null
            or exists (select from outbox.standing n
                        where n.sink = r.target and n.shard = d.shard
                          and outbox.position_passed(e.id, e.xid, n.a_seq, n.a_snapshot, n.a_next, n.b_snapshot, n.last_id,
                                                     floor_now)));
    delete from outbox.delivery d
     where d.sink = name and d.id = any (dead)
       and exists (select from outbox.delivery o where o.id = d.id and o.sink = r.target);
    update outbox.delivery d set sink = r.target, replay = r.id, ordered = false where d.sink = name and d.id = any (dead);
    return cardinality(dead);
end
$$;

-- Fold the rows of a replay's ledger into one when there are many.
create function outbox.trim_replay(replay_id bigint) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    many constant integer := 500;
begin
    if (select count(*) from (select from outbox.replay_progress p where p.replay = replay_id limit many) p) < many then
        return;
    end if;
    with gone as (
        delete from outbox.replay_progress p where p.replay = replay_id returning p.shards, p.last_ids, p.seen
    ),
    places as (
        select u.shard, max(u.last_id) as last_id
          from gone g cross join lateral unnest(g.shards, g.last_ids) u (shard, last_id) group by u.shard
    )
    insert into outbox.replay_progress (replay, shards, last_ids, seen)
    select replay_id, array_agg(l.shard order by l.shard), array_agg(l.last_id order by l.shard),
           (select sum(g.seen) from gone g)
      from places l;
end
$$;

-- Delete what a replay that has ended leaves, once no relay owns a shard of it: its other rows, which were not delivered,
-- in steps; then its shards and its ledger. Rows that no position has passed were never counted.
create function outbox.clear_replay(r outbox.replay) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    most constant integer := 1000;
    name constant text := '~' || r.id;
    counted_rows bigint;
    gone bigint;
begin
    perform from outbox.shard s where s.sink = name order by s.shard for update;
    if exists (select from outbox.shard s where s.sink = name and s.owner is not null and s.lease_until > clock_timestamp()) then
        return;
    end if;
    update outbox.shard s set owner = null, epoch = s.epoch + 1 where s.sink = name and s.owner is not null;
    counted_rows := outbox.replay_rows(r.id);
    gone := outbox.delete_rows(name, most);
    update outbox.replay p set dropped = p.dropped + counted_rows - outbox.replay_rows(r.id) where p.id = r.id;
    if gone > 0 then
        return;
    end if;
    counted_rows := outbox.replay_rows(r.id);
    perform outbox.delete_rows(name);
    update outbox.replay p
       set dropped = p.dropped + counted_rows, cleared = true,
           seen = (select coalesce(sum(g.seen), 0) from outbox.replay_progress g where g.replay = r.id)
     where p.id = r.id;
    delete from outbox.shard s where s.sink = name;
    delete from outbox.replay_progress g where g.replay = r.id;
    delete from outbox.replay_rate g where g.replay = r.id;
end
$$;

-- After a rebase: what the target has not passed now comes from the target itself, as the rebase promises. Everything is
-- counted again.
create function outbox.adopt_rebase(r outbox.replay) returns outbox.replay
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    everything constant pg_snapshot := '9223372036854775807:9223372036854775807:';
    floor_now constant bigint := (select m.floor from outbox.meta m);
begin
    if r.redirected then
        r.a_seqs := array_fill(floor_now, array[64]);
        r.a_snapshots := array_fill('3:3:'::pg_snapshot, array[64]);
        r.a_nexts := array_fill(3::bigint, array[64]);
        r.b_snapshots := array_fill(everything, array[64]);
        r.last_ids := array_fill(0::bigint, array[64]);
    else
        r := outbox.place_replay(r);
    end if;
    update outbox.replay p
       set floor = floor_now, a_seqs = r.a_seqs, a_snapshots = r.a_snapshots, a_nexts = r.a_nexts,
           b_snapshots = r.b_snapshots, last_ids = r.last_ids, counted = 0, counted_upto = p.from_id
     where p.id = r.id
    returning p.* into r;
    perform setval(pg_get_serial_sequence('outbox.replay_progress', 'seq'), greatest(max(p.seq), 1))
       from outbox.replay_progress p
     having max(p.seq) >= nextval(pg_get_serial_sequence('outbox.replay_progress', 'seq'));
    return r;
end
$$;

-- Look after a replay, a step of each: count its events, give its dead letters to the target, find out whether it is done,
-- clear it when it has ended. One session at a time does so. Its row is locked first, by which renames and removals of the
-- target wait, or are waited for.
create function outbox.tend_replay(replay_id bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    step_seconds constant double precision := 0.2;
    most_dead constant integer := 1000;
    r outbox.replay;
    counted record;
    moved integer := 0;
begin
    select * into r from outbox.replay p where p.id = replay_id and not p.cleared for update skip locked;
    if r.id is null then
        return;
    end if;
    if r.floor <> (select m.floor from outbox.meta m) then
        r := outbox.adopt_rebase(r);
    end if;
    if not r.target_gone then
        moved := outbox.move_dead(r, most_dead);
    end if;
    if moved > 0 then
        update outbox.replay p set failed = p.failed + moved where p.id = r.id returning p.* into r;
    end if;
    if r.state in ('done', 'cancelled') then
        if moved = 0 then
            perform outbox.clear_replay(r);
        end if;
        return;
    end if;
    if r.counted_upto < r.upto_id then
        select * into counted from outbox.count_matches(r, r.counted_upto, 9223372036854775807, step_seconds);
        update outbox.replay p set counted = p.counted + counted.events, counted_upto = counted.upto
         where p.id = r.id returning p.* into r;
    end if;
    perform outbox.trim_replay(r.id);
    if r.state = 'running' and r.counted_upto >= r.upto_id and outbox.at_its_end(r) then
        update outbox.replay p set state = 'done', ended_at = clock_timestamp() where p.id = r.id;
        perform outbox.record_action('replay end', r.sink, jsonb_build_object('replay', r.id), outbox.replay_delivered(r),
                                     null, null);
    end if;
end
$$;

-- True if every shard of a replay is at its end and no row of it is left. Only the owner of a shard adds rows, before
-- its position is written: behind the end none is added.
create function outbox.at_its_end(r outbox.replay) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select (select count(*) from outbox.replay_places(r.id) p where p.last_id >= r.upto_id) = 64
       and not exists (select from outbox.delivery d where d.sink = '~' || r.id)
$$;

-- The number of events that a replay has delivered: settled ones, without those that are rows, died or were dropped.
create function outbox.replay_delivered(r outbox.replay) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when r.cleared then r.seen
                else (select coalesce(sum(p.seen), 0) from outbox.replay_progress p where p.replay = r.id)::bigint end
           - r.failed - r.dropped - outbox.replay_rows(r.id)
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Lists and states
-- ---------------------------------------------------------------------------------------------------------

-- The replays, newest first: one of them, or with `unfinished` those that are running or paused. `total` is what was
-- counted so far until `total_exact`; `passed_by` of them had a row or a mark in the target, or were erased since.
create function outbox.replays(wanted bigint default null, unfinished boolean default false, most integer default 100)
returns table (
    id bigint, sink text, target text, redirected boolean, state text, type text, key text, since timestamptz,
    until timestamptz, uids integer, rate integer, total bigint, total_exact boolean, delivered bigint, failed bigint,
    waiting bigint, dropped bigint, passed_by bigint, created_at timestamptz, ended_at timestamptz, actor text, role_name text,
    reason text, target_paused boolean, relays integer, shards_left integer
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select r.id, r.sink, r.target, r.redirected, r.state, r.type_pattern, r.key, outbox.loadable_time(r.since),
           outbox.loadable_time(r.until), cardinality(r.uids), r.rate, greatest(r.counted, n.delivered + n.failed),
           r.counted_upto >= r.upto_id, n.delivered, n.failed, n.waiting, r.dropped,
           case when r.state = 'done' then greatest(r.counted - n.delivered - n.failed, 0) end,
           r.created_at, r.ended_at, r.actor, r.role_name, r.reason,
           (select k.paused from outbox.sink k where k.name = r.target),
           (select count(*)::integer from outbox.relay w
             where w.seen_at > clock_timestamp() - interval '45 seconds' and '~' || r.id = any (w.sinks)),
           case when r.cleared then 0
                else 64 - (select count(*)::integer from outbox.replay_places(r.id) p where p.last_id >= r.upto_id) end
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
     order by r.id desc
$$;

-- Pause, resume or cancel a replay, and return whether that changed it. What has ended does not change.
create function outbox.set_replay(replay_id bigint, action text, actor text, reason text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
#variable_conflict use_variable
declare
    r outbox.replay;
    wanted constant text := case action when 'pause' then 'paused' when 'resume' then 'running'
                                        when 'cancel' then 'cancelled' end;
begin
    if wanted is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'action must be pause, resume or cancel';
    end if;
    select * into r from outbox.replay p where p.id = replay_id for update;
    if r.id is null then
        raise exception using errcode = 'no_data_found', message = format('there is no replay %s', coalesce(replay_id::text, 'null'));
    end if;
    if r.state = wanted then
        return false;
    end if;
    if r.state in ('done', 'cancelled') then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('replay %s is %s already', replay_id, r.state);
    end if;
    update outbox.replay p
       set state = wanted, ended_at = case when wanted = 'cancelled' then clock_timestamp() end, reason = coalesce(reason, p.reason)
     where p.id = replay_id;
    perform outbox.record_action('replay ' || action, r.sink, jsonb_build_object('replay', replay_id), 1, actor, reason);
    return true;
end
$$;

-- A sink that is deleted cancels the replays to it; outbox.follow_rename comes first for one that is renamed. By its name
-- this runs before outbox.sink_deleted: it waits for a session that gives dead letters to the sink, which are then deleted.
create function outbox.replays_cancelled() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    r outbox.replay;
begin
    update outbox.replay p set target_gone = true
     where not p.cleared and p.target = any (array(select d.name from removed d));
    for r in
        update outbox.replay p
           set state = 'cancelled', ended_at = clock_timestamp(), reason = format('sink %s was removed', p.target)
         where p.state in ('running', 'paused') and p.target = any (array(select d.name from removed d))
        returning p.*
    loop
        perform outbox.record_action('replay cancel', r.sink, jsonb_build_object('replay', r.id), 1, null, r.reason);
    end loop;
    return null;
end
$$;

create trigger replays_cancelled after delete on outbox.sink
referencing old table as removed
for each statement execute function outbox.replays_cancelled();

-- Let replays follow a sink to its new name.
create function outbox.follow_rename(old_name text, new_name text) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    update outbox.replay r
       set sink = case when r.sink = old_name then new_name else r.sink end,
           target = case when r.target = old_name then new_name else r.target end
     where old_name in (r.sink, r.target)
$$;

-- The replays that keep a partition of the log, as outbox.day_keepers has it: those that may still read an event of it.
create function outbox.replay_keepers(part regclass, before timestamptz) returns jsonb
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    kept jsonb := '[]';
    r record;
    there boolean;
begin
    for r in
        select p.id, p.state, p.since, p.until, p.ids, p.upto_id,
               (select min(l.last_id)
                  from (select max(u.last_id) as last_id
                          from outbox.replay_progress g cross join lateral unnest(g.shards, g.last_ids) u (shard, last_id)
                         where g.replay = p.id group by u.shard) l) as last_id,
               case when p.counted_upto < p.upto_id then p.counted_upto end as counted_upto
          from outbox.replay p where p.state in ('running', 'paused') order by p.id
    loop
        execute format(
            'select exists (select from %s e where e.id > $1 and e.id <= $2 and e.created_at < $3 '
            '   and ($4 is null or e.created_at >= $4) and ($5 is null or e.created_at < $5) '
            '   and ($6 is null or e.id = any ($6)))', part)
           into there using least(r.last_id, r.counted_upto), r.upto_id, before, r.since, r.until, r.ids;
        if there then
            kept := kept || jsonb_build_object('kind', 'replay', 'name', r.id::text, 'paused', r.state = 'paused');
        end if;
    end loop;
    return kept;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Why
-- ---------------------------------------------------------------------------------------------------------

-- The newest 20 replays that mean an event of the log, by the sink to which they deliver it: {"replays": [{"id", "state"}]}.
-- Those from before a rebase are left out: ids and transactions had other numbers then.
create function outbox.replays_of(wanted uuid) returns table (sink text, replays jsonb)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select n.target, jsonb_build_object('replays', jsonb_agg(jsonb_build_object('id', n.id, 'state', n.state) order by n.id))
      from (
        select r.id, r.target, r.state
          from (select e.* from outbox.event e where e.uid = wanted order by e.id + 0 desc limit 1) e
          join outbox.replay r
            on r.from_id < e.id and r.upto_id >= e.id and (r.ids is null or e.id = any (r.ids)) and not r.target_gone
               and r.floor = (select m.floor from outbox.meta m)
               and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                       r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts,
                                       r.b_snapshots, r.last_ids)
         order by r.id desc
         limit 20
      ) n
     group by n.target
$$;

-- An event and its states, as `why --json` shows them but for the recorded attempts; null if neither the log, a row, a mark
-- nor a record has it.
create function outbox.why(wanted uuid) returns json
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    with known as (
        (select 1 as place, e.id, e.shard, e.type, e.key, e.created_at
           from outbox.event e where e.uid = wanted order by e.id + 0 desc limit 1)
        union all
        (select 2, d.id, d.shard, d.type, d.key, d.created_at
           from outbox.delivery d where d.uid = wanted order by d.id desc limit 1)
        union all
        (select 3, m.id, null, null, null, null from outbox.discarded m where m.uid = wanted order by m.id desc limit 1)
        union all
        (select 4, a.id, null, null, null, null from outbox.attempt a where a.uid = wanted order by a.id desc limit 1)
    )
    select json_build_object(
               'uid', wanted, 'type', k.type, 'key', k.key, 'id', k.id, 'shard', k.shard, 'in_log', k.place = 1,
               'created_at', k.created_at, 'age_seconds', outbox.in_seconds(now() - outbox.loadable_time(k.created_at)),
               'sinks', coalesce((select json_object_agg(s.sink, jsonb_build_object('state', s.state) || s.details
                                                                 || coalesce(r.replays, '{}') order by s.sink)
                                    from outbox.event_states(wanted) s
                                    left join outbox.replays_of(wanted) r on r.sink = s.sink), '{}'))
      from known k
     order by k.place
     limit 1
$$;
