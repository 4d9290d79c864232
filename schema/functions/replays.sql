-- Start a replay and return its number. The counter of configurations is raised, by which a day that was checked before is
-- checked again before it is emptied.
create or replace function outbox.start_replay(
    filter jsonb, to_sink text, rate integer, actor text, reason text, out id bigint, out paused boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
#variable_conflict use_variable
declare
    most constant integer := 100;
    tick record;
    r outbox.replay;
    fence bigint;
begin
    perform outbox_internal.begin_action('outbox.start_replay');
    if rate not between 1 and 1000000 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('rate must be 1 to 1000000 events per second, not %s', rate);
    end if;
    lock table outbox.event in access share mode;  -- before the sinks, as outbox.rebase locks them
    tick := outbox_internal.tick();
    r := outbox_internal.plan_replay(filter, to_sink, tick.seq, tick.snapshot, tick.next_xid);
    lock table outbox.sink in share row exclusive mode;
    perform outbox_internal.require_sink(r.sink), outbox_internal.require_sink(r.target);
    perform outbox_internal.require_config(tick.generations);
    if (select count(*) from outbox.replay p where not p.cleared) >= most then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s replays have not ended, and there may be no more: cancel some of them', most);
    end if;
    fence := outbox_internal.raise_config() << 32;
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
    paused := (select k.paused from outbox.sink k where k.name = r.target);
    perform outbox_internal.record_action('replay start', r.sink,
                                 filter || jsonb_strip_nulls(jsonb_build_object('replay', id, 'to', to_sink, 'rate', rate)),
                                 1, actor, reason);
end
$$;
comment on function outbox.start_replay is
    'Start a replay, which delivers events of the log again to one sink, and return its number. Recorded in outbox.audit.';

-- Plan a replay: `filter` is that of outbox_internal.read_filter with sink, type, key, since, until and uids. With `to_sink` it
-- goes to that sink. The tick was taken before: places are looked up after it, so an event with a lower id that is committed
-- between the two is none of the replay's. To another sink, notices are replayed only if that one receives them.
create or replace function outbox_internal.plan_replay(
    filter jsonb, to_sink text, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint
) returns outbox.replay
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
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
    f := outbox_internal.read_filter(filter, clock_timestamp());
    if f.sink is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'a replay needs a sink';
    end if;
    if f.since is null and f.key is null and f.uids is null then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'a replay needs since, key or uids: to deliver everything again, seek the sink to the beginning';
    end if;
    if to_sink is not null then
        perform outbox_internal.require_sink(to_sink);
    end if;
    perform outbox_internal.require_days(f.since);
    r.sink := f.sink;
    r.target := coalesce(to_sink, f.sink);
    r.redirected := to_sink is not null;
    r.type_pattern := filter ->> 'type';
    r.type_like := f.type_like;
    r.routed := outbox_internal.types_of(f.sink);
    if r.redirected and not 'outbox.%' = any (coalesce(outbox_internal.types_of(to_sink), '{}')) then
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
        r := outbox_internal.place_replay(r);
    end if;
    newest := coalesce((select max(e.id) from outbox.event e), 0);
    if f.uids is not null then
        r.ids := array(select i.id from unnest(f.uids) u (uid) cross join lateral outbox_internal.event_id(u.uid) i (id)
                        where i.id is not null order by 1);
        r.from_id := coalesce(r.ids[1] - 1, newest);
        r.upto_id := greatest(r.from_id, coalesce(r.ids[cardinality(r.ids)], newest));
    else
        r.from_id := coalesce(case when f.since is null then (select min(e.id) from outbox.event e)
                                   else outbox_internal.first_id_since(f.since, 5) end - 1, newest);
        if f.until is not null then
            beyond := outbox_internal.id_behind(f.until);
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
create or replace function outbox.preview_replay(
    filter jsonb, to_sink text, most integer, most_seconds double precision, alive_seconds double precision,
    out matched bigint, out exact boolean, out unknown text[], out oldest timestamptz, out paused boolean,
    out relays integer
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
declare
    tick record;
    r outbox.replay;
    limited constant integer := least(greatest(coalesce(most, 10000), 0), 100000);
    counted record;
begin
    lock table outbox.event in access share mode;
    tick := outbox_internal.tick();
    r := outbox_internal.plan_replay(filter, to_sink, tick.seq, tick.snapshot, tick.next_xid);
    select * into counted from outbox_internal.count_matches(r, r.from_id, limited, least(greatest(coalesce(most_seconds, 5), 0), 60));
    matched := least(counted.events, limited);
    exact := counted.events <= limited and counted.upto >= r.upto_id;
    unknown := array(select u.uid::text from unnest(r.uids) u (uid)
                      where outbox_internal.event_id(u.uid) is null order by 1);
    if r.since is null and r.uids is null then
        oldest := outbox_internal.loadable_time((select e.created_at from outbox.event e order by e.id limit 1));
    end if;
    paused := (select k.paused from outbox.sink k where k.name = r.target);
    relays := (select count(*) from outbox.relay w
                where w.seen_at > clock_timestamp() - least(greatest(coalesce(alive_seconds, 30), 0), 86400) * interval '1 second' and r.target = any (w.sinks));
end
$$;
comment on function outbox.preview_replay is
    'The number of events that a replay would deliver, counted without starting it.';

-- The target's position by shard as a replay keeps it. A shard without a position has passed nothing.
create or replace function outbox_internal.place_replay(r outbox.replay) returns outbox.replay
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

-- Pause, resume or cancel a replay, and return whether that changed it. What has ended does not change.
create or replace function outbox.set_replay(replay_id bigint, action text, actor text, reason text) returns boolean
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
    perform outbox_internal.record_action('replay ' || action, r.sink, jsonb_build_object('replay', replay_id), 1, actor, reason);
    return true;
end
$$;
comment on function outbox.set_replay is
    'Pause, resume or cancel a replay, and return whether that changed it. Recorded in outbox.audit.';

-- The replays, newest first: one of them, or with `unfinished` those that are running or paused. `total` is what was
-- counted so far until `total_exact`; `passed_by` of them had a row or a mark in the target, or were erased since.
-- Settlements count it.
create or replace function outbox.replays(wanted bigint default null, unfinished boolean default false, most integer default 100)
returns table (
    id bigint, sink text, target text, redirected boolean, state text, type text, key text, since timestamptz,
    until timestamptz, uids integer, rate integer, total bigint, total_exact boolean, delivered bigint, failed bigint,
    waiting bigint, dropped bigint, passed_by bigint, created_at timestamptz, ended_at timestamptz, actor text, role_name text,
    reason text, target_paused boolean, relays integer, shards_left integer, tenant text
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select r.id, r.sink, r.target, r.redirected, r.state, r.type_pattern, r.key, outbox_internal.loadable_time(r.since),
           outbox_internal.loadable_time(r.until), cardinality(r.uids), r.rate,
           greatest(r.counted, n.delivered + n.failed + b.passed_by),
           r.counted_upto >= r.upto_id, n.delivered, n.failed, n.waiting, r.dropped, b.passed_by,
           r.created_at, r.ended_at, r.actor, r.role_name, r.reason,
           (select k.paused from outbox.sink k where k.name = r.target),
           (select count(*)::integer from outbox.relay w
             where w.seen_at > clock_timestamp() - interval '45 seconds' and '~' || r.id = any (w.sinks)),
           case when r.cleared then 0
                else 64 - (select count(*)::integer from outbox_internal.replay_places(r.id) p where p.last_id >= r.upto_id) end,
           r.tenant
      from (
        select p.* from outbox.replay p
         where (wanted is null or p.id = wanted) and (not unfinished or p.state in ('running', 'paused'))
         order by p.id desc limit least(greatest(coalesce(most, 100), 0), 1000)
      ) r
     cross join lateral (
        select count(*) filter (where d.state = 'dead') as dead, count(*) filter (where d.state <> 'dead') as waiting
          from outbox.delivery d join outbox_internal.replay_places(r.id) p on p.shard = d.shard and d.id <= p.last_id
         where d.sink = '~' || r.id
     ) d
     cross join lateral (
        select outbox_internal.replay_delivered(r) as delivered, r.failed + d.dead as failed, d.waiting
     ) n
     cross join lateral (select outbox_internal.replay_passed_by(r) as passed_by) b
     order by r.id desc
$$;
comment on function outbox.replays is
    'The replays and how far they have come, newest first; with `unfinished` those that run or are paused.';

-- The next events of a replay, with those that it passes by: these have an empty uid and type, and the reason as
-- their fault. Both are judged in the snapshot of the read and count for its limit, so an event up to the last one is in one
-- of the two parts, or the filter does not mean it. The parts come one after the other, each in id order.
-- The offset is legal even if nothing was returned: a plan may look at it first.
create or replace function outbox_internal.read_replayed(
    replay_id bigint, shards smallint[], after_id bigint, upto_id bigint, most_rows integer, most_bytes bigint,
    most_payload bigint
) returns setof outbox_internal.read_event
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
    r constant outbox.replay := (select p from outbox.replay p where p.id = replay_id);
    ceiling constant bigint := least(most_payload, outbox_internal.payload_ceiling());
    wanted constant smallint[] := array(select s from unnest(shards) s
                                        intersect select s from unnest(outbox_internal.replay_shards(r.key)) s);
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
                   case when r.redirected then null
                        when (select true from outbox.delivery d where d.id = e.id and d.sink = r.target) then 'row'
                        when (select m.uid = e.uid from outbox.discarded m where m.sink = r.target and m.id = e.id)
                        then 'discarded' end as reason
              from outbox.event e
             where e.id = any (r.ids) and e.id > low and e.id <= high and e.shard = any (wanted)
               and outbox_internal.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
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
                   case when r.redirected then null
                        when (select true from outbox.delivery d where d.id = e.id and d.sink = r.target) then 'row'
                        when (select m.uid = e.uid from outbox.discarded m where m.sink = r.target and m.id = e.id)
                        then 'discarded' end as reason
              from outbox.event e
             where e.id > low and e.id <= high and e.shard = any (wanted)
               and outbox_internal.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                       r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots,
                                       r.a_nexts, r.b_snapshots, r.last_ids)
               and (r.tenant is null or e.tenant = r.tenant)
             order by e.id
             limit most_rows
          ) c;
    end if;
    return query
    select w.*
      from (
        select f.*, sum(outbox_internal.bytes_of(f.payload, f.key, f.headers))
                    over (order by f.id rows between unbounded preceding and 1 preceding) as bytes_before
          from (
            select r.*
              from (
                select l.* from outbox.event l where l.id = any (chosen) order by l.id
              ) e
             cross join lateral outbox_internal.readable(e, ceiling, null) r
             order by r.id offset 0
          ) f
      ) w
     where w.bytes_before < most_bytes or w.bytes_before is null
     order by w.id;
    get diagnostics returned = row_count;
    -- Of a read that was cut by its bytes, those before the last event that it returned.
    return query
    select p.id, p.shard, '', '', null::text, null::bytea, '', null::text, null::timestamptz, now(), p.reason,
           null::text, null::bigint
      from unnest(passed_ids, passed_shards, reasons) p (id, shard, reason)
     where returned = coalesce(cardinality(chosen), 0)
        or p.id < (select c.id from unnest(chosen) c (id) order by c.id offset greatest(returned - 1, 0) limit 1)
     order by p.id;
end
$$;

-- One settlement of a replay, as outbox_internal.settle, except that positions need the fence too: what they add to `seen` is
-- counted once, and so are the events that they pass by. Those are null if the caller does not know them. Returns false,
-- and has written nothing, when the fence fails.
create or replace function outbox_internal.settle_replayed(
    replay_id bigint, owner_id uuid, shards smallint[], epochs bigint[], last_ids bigint[], seen bigint,
    passed_ids bigint[], passed_reasons text[],
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
set jit = off
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
    if cardinality(ids) > 0 and not outbox_internal.settle(
        name, owner_id, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', ids, states, ordereds, due_in,
        attempt_counts, claim_counts, leases, lease_for, errors, statuses, last_attempts, fence_shards, fence_epochs
    ) then
        return false;
    end if;
    if cardinality(shards) > 0 then
        insert into outbox.replay_progress (replay, shards, last_ids, seen, passed_by)
        values (replay_id, shards, last_ids, seen, cardinality(passed_ids));
        insert into outbox.replay_exception (replay, id, outcome, reason)
        select replay_id, p.id, 'passed by', p.reason from unnest(passed_ids, passed_reasons) p (id, reason)
            on conflict do nothing;
    end if;
    return true;
end
$$;

-- Pay for the events that were read of a replay, and return how many may be read now: less than 1 means to wait for
-- that many at the rate of the replay. At most the events of one second are saved up.
create or replace function outbox_internal.spend_replay(replay_id bigint, spent integer) returns double precision
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    update outbox.replay r
       set tokens = least(greatest(r.rate, 1), r.tokens
                              + r.rate * greatest(0, extract(epoch from clock_timestamp() - r.tokens_at)::double precision)) - spent,
           tokens_at = clock_timestamp()
     where r.id = replay_id and r.rate is not null and not r.cleared
    returning r.tokens
$$;

-- Look after a replay, a step of each: count its events, give its dead letters to the target, find out whether it is done,
-- clear it when it has ended. One session at a time does so. Its row is locked first, by which renames and removals of the
-- target wait, or are waited for.
create or replace function outbox_internal.tend_replay(replay_id bigint) returns void
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
        r := outbox_internal.adopt_rebase(r);
    end if;
    if not r.target_gone then
        moved := outbox_internal.move_dead(r, most_dead);
    end if;
    if moved > 0 then
        update outbox.replay p set failed = p.failed + moved where p.id = r.id returning p.* into r;
    end if;
    if r.state in ('done', 'cancelled') then
        if moved = 0 then
            perform outbox_internal.clear_replay(r);
        end if;
        return;
    end if;
    if r.counted_upto < r.upto_id then
        select * into counted from outbox_internal.count_matches(r, r.counted_upto, 9223372036854775807, step_seconds);
        update outbox.replay p set counted = p.counted + counted.events, counted_upto = counted.upto
         where p.id = r.id returning p.* into r;
    end if;
    perform outbox_internal.trim_replay(r.id);
    if r.state = 'running' and r.counted_upto >= r.upto_id and outbox_internal.at_its_end(r) then
        update outbox.replay p set state = 'done', ended_at = clock_timestamp() where p.id = r.id;
        perform outbox_internal.record_action('replay end', r.sink, jsonb_build_object('replay', r.id), outbox_internal.replay_delivered(r),
                                     null, null);
    end if;
end
$$;

-- Fold the rows of a replay's ledger into one when there are many.
create or replace function outbox_internal.trim_replay(replay_id bigint) returns void
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
        delete from outbox.replay_progress p where p.replay = replay_id
        returning p.shards, p.last_ids, p.seen, p.passed_by
    ),
    places as (
        select u.shard, max(u.last_id) as last_id
          from gone g cross join lateral unnest(g.shards, g.last_ids) u (shard, last_id) group by u.shard
    )
    insert into outbox.replay_progress (replay, shards, last_ids, seen, passed_by)
    select replay_id, array_agg(l.shard order by l.shard), array_agg(l.last_id order by l.shard),
           (select sum(g.seen) from gone g), (select sum(g.passed_by) from gone g)
      from places l;
end
$$;

-- Delete what a replay that has ended leaves, once no relay owns a shard of it: its other rows, which were not delivered,
-- in steps; then its shards and its ledger.
create or replace function outbox_internal.clear_replay(r outbox.replay) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    most constant integer := 1000;
    name constant text := '~' || r.id;
begin
    perform from outbox.shard s where s.sink = name order by s.shard for update;
    if exists (select from outbox.owned s where s.sink = name) then
        return;
    end if;
    update outbox.shard s set owner = null, epoch = s.epoch + 1 where s.sink = name and s.owner is not null;
    if outbox_internal.drop_replay_rows(r, most) = most then
        return;
    end if;
    update outbox.replay p
       set cleared = true, passed_by = outbox_internal.replay_passed_by(r),
           end_ids = array(select l.last_id from outbox_internal.replay_places(r.id) l order by l.shard),
           seen = (select coalesce(sum(g.seen), 0) from outbox.replay_progress g where g.replay = r.id)
     where p.id = r.id;
    delete from outbox.shard s where s.sink = name;
    delete from outbox.session s where s.sink = name;
    delete from outbox.replay_progress g where g.replay = r.id;
end
$$;

-- The number of events that a replay has delivered: settled ones, without those that are rows, died or were dropped.
create or replace function outbox_internal.replay_delivered(r outbox.replay) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when r.cleared then r.seen
                else (select coalesce(sum(p.seen), 0) from outbox.replay_progress p where p.replay = r.id)::bigint end
           - r.failed - r.dropped - outbox_internal.replay_rows(r.id)
$$;

-- The replays that keep a partition of the log, as outbox_internal.retention_blockers has it: those that may still read an
-- event of it. Each with its start, since when it keeps the partition.
create or replace function outbox_internal.replay_keepers(part regclass, before timestamptz) returns jsonb
language plpgsql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
declare
    kept jsonb := '[]';
    r record;
    there boolean;
begin
    for r in
        select p.id, p.state, p.since, p.until, p.ids, p.upto_id, p.created_at,
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
            kept := kept || jsonb_build_object('kind', 'replay', 'name', r.id::text, 'paused', r.state = 'paused',
                                               'since', date_trunc('second', r.created_at));
        end if;
    end loop;
    return kept;
end
$$;

-- The outcome of an event that a replay means. `settled` is true if the destination has received it: by the replay, or as
-- a dead letter that was given to the target, once the target has neither a row nor a mark of it.
--
-- The first that holds: an exception · a row that the position has passed · not passed by the position · delivered, if it was
-- settled since the last rebase · by its recorded attempt, the target's row or the counts, if not.
create or replace function outbox_internal.replay_outcome(
    r outbox.replay, event_id bigint, event_shard smallint, event_uid uuid,
    out outcome text, out reason text, out settled boolean
)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with found as (
        select x.outcome as exception, x.reason, o.state as row_state,
               r.state = 'done' or case when r.cleared then r.end_ids[event_shard + 1]
                                        else (select p.last_id from outbox_internal.replay_places(r.id) p where p.shard = event_shard)
                                   end >= event_id as covered,
               r.state = 'cancelled' as cancelled
          from (values (1)) one (n)
          left join outbox.replay_exception x on x.id = event_id and x.replay = r.id
          left join outbox.delivery o on o.id = event_id and o.sink = '~' || r.id
    ),
    judged as (
        select f.*,
               case when f.exception = 'dropped' then 'cancelled'
                    when f.exception is not null then f.exception
                    when f.covered and f.row_state = 'dead' then 'failed'
                    when f.row_state is not null or not f.covered then case when f.cancelled then 'cancelled' else 'pending' end
                    when f.covered and event_id > coalesce(r.unknown_upto[event_shard + 1], 0) then 'delivered'
                    when exists (select from outbox.attempt a
                                  where a.uid = event_uid and a.id = event_id and a.outcome = 'delivered'
                                    and a.detail ->> 'replay' = r.id::text) then 'delivered'
                    when exists (select from outbox.delivery d
                                  where d.id = event_id and d.sink = r.target and d.replay = r.id) then 'failed'
                    when r.state = 'done' and r.unknown_upto is null and r.counted = outbox_internal.replay_delivered(r) then 'delivered'
                    else 'unknown' end as outcome
          from found f
    )
    select j.outcome, j.reason, j.outcome = 'delivered' or coalesce(j.exception = 'failed', false)
      from judged j
$$;

-- The newest 20 replays that mean an event of the log, by the sink to which they deliver it, as {"id", "state", "outcome",
-- "reason"}; and whether the destination has received it by one of the newest 1,000. Those from before a rebase are left
-- out: ids and transactions had other numbers then.
create or replace function outbox_internal.replay_outcomes(wanted uuid)
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
              from (select l.* from outbox.event l
                     where l.id = (select outbox_internal.event_id(wanted)) and l.uid = wanted limit 1) e
              join outbox.replay r
                on r.from_id < e.id and r.upto_id >= e.id and (r.ids is null or e.id = any (r.ids)) and not r.target_gone
                   and r.floor = (select m.floor from outbox.meta m)
                   and outbox_internal.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                           r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts,
                                           r.b_snapshots, r.last_ids)
                   and (r.tenant is null or e.tenant = r.tenant)
             order by r.id desc
             limit 1000
          ) m
         cross join lateral outbox_internal.replay_outcome(m.replay, m.event_id, m.shard, m.uid) o
      ) n
     group by n.target
$$;

-- The number of events that a replay has passed by.
create or replace function outbox_internal.replay_passed_by(r outbox.replay) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when r.cleared then r.passed_by
                else (select coalesce(sum(p.passed_by), 0) from outbox.replay_progress p where p.replay = r.id)::bigint end
$$;

-- The last id that is settled of each shard of a replay.
create or replace function outbox_internal.replay_places(replay_id bigint) returns table (shard smallint, last_id bigint)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select u.shard, max(u.last_id)
      from outbox.replay_progress p cross join lateral unnest(p.shards, p.last_ids) u (shard, last_id)
     where p.replay = replay_id
     group by u.shard
$$;

-- The number of rows of a replay that its positions have passed.
create or replace function outbox_internal.replay_rows(replay_id bigint) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select count(*)
      from outbox.delivery d join outbox_internal.replay_places(replay_id) p on p.shard = d.shard
     where d.sink = '~' || replay_id and d.id <= p.last_id
$$;

-- The shards in which a replay has events.
create or replace function outbox_internal.replay_shards(key text) returns smallint[]
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select case when key is null then array(select n::smallint from generate_series(0, 63) n)
                else array[(hashtextextended(key collate "C", 0) & 63)::smallint] end
$$;

-- Delete up to `most` rows of a replay that has ended, and return how many there were. Those that its positions have passed
-- are dropped; the others were never counted.
create or replace function outbox_internal.drop_replay_rows(r outbox.replay, most integer) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    name constant text := '~' || r.id;
    doomed bigint[];
    dropped_now bigint;
begin
    doomed := array(
        (select d.id from outbox.delivery d where d.sink = name and d.state = 'dead' order by d.id limit most)
        union all
        (select d.id from outbox.delivery d where d.sink = name and d.state = 'waiting' order by d.due_at, d.id limit most)
        union all
        (select d.id from outbox.delivery d where d.sink = name and d.state = 'held' order by d.key limit most)
        limit most);
    with gone as (
        delete from outbox.delivery d where d.sink = name and d.id = any (doomed) returning d.id, d.shard
    ),
    dropped as (
        insert into outbox.replay_exception (replay, id, outcome)
        select r.id, g.id, 'dropped'
          from gone g join outbox_internal.replay_places(r.id) p on p.shard = g.shard and g.id <= p.last_id
            on conflict do nothing
        returning 1
    )
    select count(*) into dropped_now from dropped;
    update outbox.replay p set dropped = p.dropped + dropped_now where p.id = r.id;
    return cardinality(doomed);
end
$$;

-- True if every shard of a replay is at its end and no row of it is left. Only the owner of a shard adds rows, before
-- its position is written: behind the end none is added.
create or replace function outbox_internal.at_its_end(r outbox.replay) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select (select count(*) from outbox_internal.replay_places(r.id) p where p.last_id >= r.upto_id) = 64
       and not exists (select from outbox.delivery d where d.sink = '~' || r.id)
$$;

-- An id behind all events that were emitted before a time, with the margin of outbox_internal.first_id_since; null if there is
-- none.
create or replace function outbox_internal.id_behind(until timestamptz) returns bigint
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

-- After a rebase: what the target has not passed now comes from the target itself, as the rebase promises. Everything is
-- counted again.
-- What was settled before is kept apart: the replay means other events now.
create or replace function outbox_internal.adopt_rebase(r outbox.replay) returns outbox.replay
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
        r := outbox_internal.place_replay(r);
    end if;
    update outbox.replay p
       set floor = floor_now, a_seqs = r.a_seqs, a_snapshots = r.a_snapshots, a_nexts = r.a_nexts,
           b_snapshots = r.b_snapshots, last_ids = r.last_ids, counted = 0, counted_upto = p.from_id,
           unknown_upto = array(select l.last_id from outbox_internal.replay_places(r.id) l order by l.shard)
     where p.id = r.id
    returning p.* into r;
    perform setval(pg_get_serial_sequence('outbox.replay_progress', 'seq'), greatest(max(p.seq), 1))
       from outbox.replay_progress p
     having max(p.seq) >= nextval(pg_get_serial_sequence('outbox.replay_progress', 'seq'));
    return r;
end
$$;

-- Give up to `most` dead letters of a replay to its target, and return how many there were: only those that the replay's
-- position has passed, so that none is read again, and the target's, which would take such a row for one of its own first
-- delivery. Where the target has a row of the event, that one stays. They take part in no order: no live event waits
-- behind them.
-- Each dead letter leaves an exception.
create or replace function outbox_internal.move_dead(r outbox.replay, most integer) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
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
          join outbox_internal.replay_places(r.id) p on p.shard = d.shard and d.id <= p.last_id
          left join lateral (select e.id, e.xid from outbox.event e where e.id = d.id limit 1) e on true
         where e.id is null
            or exists (select from outbox.standing n
                        where n.sink = r.target and n.shard = d.shard
                          and outbox_internal.position_passed(e.id, e.xid, n.a_seq, n.a_snapshot, n.a_next, n.b_snapshot, n.last_id,
                                                     floor_now)));
    delete from outbox.delivery d
     where d.sink = name and d.id = any (dead)
       and exists (select from outbox.delivery o where o.id = d.id and o.sink = r.target);
    update outbox.delivery d set sink = r.target, replay = r.id, ordered = false where d.sink = name and d.id = any (dead);
    insert into outbox.replay_exception (replay, id, outcome)
    select r.id, i.id, 'failed' from unnest(dead) i (id)
        on conflict do nothing;
    return cardinality(dead);
end
$$;
