-- The outcome of each event in a replay: so that `why` tells whether a replay delivered it, and counts of events that were
-- passed by are counted. Relays made for version 2 work on this schema. Events that one of an earlier version than 15
-- settles in a replay have an unknown outcome, unless it is known otherwise.

-- ---------------------------------------------------------------------------------------------------------
-- Exceptions
-- ---------------------------------------------------------------------------------------------------------

-- The events that a replay means and did not deliver, for as long as the log has them: passed by with a reason, failed (a
-- dead letter that was given to the target), or dropped (a row of a cancelled replay). Each is written in the transaction
-- that moves the position past the event, moves its row, or deletes that.
create table outbox.replay_exception (
    replay bigint not null references outbox.replay (id) on delete cascade,
    id bigint not null,
    outcome text not null check (outcome in ('passed by', 'failed', 'dropped')),
    reason text check (reason in ('row', 'discarded', 'not due')),
    primary key (id, replay)
);

alter table outbox.replay add column passed_by bigint, add column end_ids bigint[], add column unknown_upto bigint[];
comment on column outbox.replay.passed_by is
    'The number of events that were passed by, of a cleared replay; null if an earlier version settled some of its events.';
comment on column outbox.replay.end_ids is 'The last id of each shard that was settled, by shard, of a cleared replay.';
comment on column outbox.replay.unknown_upto is
    'The last id of each shard that was settled when a rebase was adopted. Up to there it meant other events.';

alter table outbox.replay_progress add column passed_by bigint default 0;
comment on column outbox.replay_progress.passed_by is
    'The number of events that were passed by since the row before; null if an earlier version of a relay wrote the row.';
update outbox.replay_progress p
   set passed_by = null
  from outbox.replay r
 where r.id = p.replay and (p.seen > 0 or exists (select from unnest(p.last_ids) l (last_id) where l.last_id > r.from_id));

-- ---------------------------------------------------------------------------------------------------------
-- Reads and settlements
-- ---------------------------------------------------------------------------------------------------------

-- As outbox.read_replay, with the events that the replay passes by: these have an empty uid and type, and the reason as
-- their fault. Both are judged in the snapshot of the read and count for its limit, so an event up to the last one is in one
-- of the two parts, or the filter does not mean it. The parts come one after the other, each in id order.
create function outbox.read_replayed(
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
                   case when r.redirected then case when e.deliver_at > now() then 'not due' end
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
                   case when r.redirected then case when e.deliver_at > now() then 'not due' end
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

-- One settlement of a replay, as outbox.settle, except that positions need the fence too: what they add to `seen` is
-- counted once, and so are the events that they pass by. Those are null if the caller does not know them. Returns false,
-- and has written nothing, when the fence fails.
create function outbox.settle_replayed(
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
        insert into outbox.replay_progress (replay, shards, last_ids, seen, passed_by)
        values (replay_id, shards, last_ids, seen, cardinality(passed_ids));
        insert into outbox.replay_exception (replay, id, outcome, reason)
        select replay_id, p.id, 'passed by', p.reason from unnest(passed_ids, passed_reasons) p (id, reason)
            on conflict do nothing;
    end if;
    return true;
end
$$;

-- As in version 8, for relays of versions 8 to 13, which do not know the events that they pass by.
create or replace function outbox.settle_replay(
    replay_id bigint, owner_id uuid, shards smallint[], epochs bigint[], last_ids bigint[], seen bigint,
    ids bigint[], states text[], ordereds boolean[], due_in double precision[], attempt_counts integer[],
    claim_counts integer[], leases uuid[], lease_for double precision[], errors text[], statuses integer[],
    last_attempts text[], fence_shards smallint[], fence_epochs bigint[]
) returns boolean
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select outbox.settle_replayed(replay_id, owner_id, shards, epochs, last_ids, seen, null, null, ids, states, ordereds,
                                  due_in, attempt_counts, claim_counts, leases, lease_for, errors, statuses, last_attempts,
                                  fence_shards, fence_epochs)
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Looking after replays
-- ---------------------------------------------------------------------------------------------------------

-- As in version 8. What was settled before is kept apart: the replay means other events now.
create or replace function outbox.adopt_rebase(r outbox.replay) returns outbox.replay
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
           b_snapshots = r.b_snapshots, last_ids = r.last_ids, counted = 0, counted_upto = p.from_id,
           unknown_upto = array(select l.last_id from outbox.replay_places(r.id) l order by l.shard)
     where p.id = r.id
    returning p.* into r;
    perform setval(pg_get_serial_sequence('outbox.replay_progress', 'seq'), greatest(max(p.seq), 1))
       from outbox.replay_progress p
     having max(p.seq) >= nextval(pg_get_serial_sequence('outbox.replay_progress', 'seq'));
    return r;
end
$$;

-- The number of events that a replay has passed by; null if an earlier version settled some of its events.
create function outbox.replay_passed_by(r outbox.replay) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when r.cleared then r.passed_by
                else (select case when count(*) = count(p.passed_by) then sum(p.passed_by) end
                        from outbox.replay_progress p where p.replay = r.id)::bigint end
$$;

-- As in version 8. Each dead letter leaves an exception.
create or replace function outbox.move_dead(r outbox.replay, most integer) returns integer
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
    insert into outbox.replay_exception (replay, id, outcome)
    select r.id, i.id, 'failed' from unnest(dead) i (id)
        on conflict do nothing;
    return cardinality(dead);
end
$$;

-- As in version 8, with the number of events that were passed by.
create or replace function outbox.trim_replay(replay_id bigint) returns void
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
           (select sum(g.seen) from gone g),
           (select case when count(*) = count(g.passed_by) then sum(g.passed_by) end from gone g)
      from places l;
end
$$;

-- Delete up to `most` rows of a replay that has ended, and return how many there were. Those that its positions have passed
-- are dropped; the others were never counted.
create function outbox.drop_replay_rows(r outbox.replay, most integer) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
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
          from gone g join outbox.replay_places(r.id) p on p.shard = g.shard and g.id <= p.last_id
            on conflict do nothing
        returning 1
    )
    select count(*) into dropped_now from dropped;
    update outbox.replay p set dropped = p.dropped + dropped_now where p.id = r.id;
    return cardinality(doomed);
end
$$;

-- Delete what a replay that has ended leaves, once no relay owns a shard of it: its other rows, which were not delivered,
-- in steps; then its shards and its ledger.
create or replace function outbox.clear_replay(r outbox.replay) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    most constant integer := 1000;
    name constant text := '~' || r.id;
begin
    perform from outbox.shard s where s.sink = name order by s.shard for update;
    if exists (select from outbox.shard s where s.sink = name and s.owner is not null and s.lease_until > clock_timestamp()) then
        return;
    end if;
    update outbox.shard s set owner = null, epoch = s.epoch + 1 where s.sink = name and s.owner is not null;
    if outbox.drop_replay_rows(r, most) = most then
        return;
    end if;
    update outbox.replay p
       set cleared = true, passed_by = outbox.replay_passed_by(r),
           end_ids = array(select l.last_id from outbox.replay_places(r.id) l order by l.shard),
           seen = (select coalesce(sum(g.seen), 0) from outbox.replay_progress g where g.replay = r.id)
     where p.id = r.id;
    delete from outbox.shard s where s.sink = name;
    delete from outbox.replay_progress g where g.replay = r.id;
    delete from outbox.replay_rate g where g.replay = r.id;
end
$$;

-- Remove exceptions of events that the log no longer has, a thousand at most, and return how many.
create function outbox.trim_replay_exceptions() returns bigint
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    with gone as (
        delete from outbox.replay_exception x
         where (x.id, x.replay) in (select o.id, o.replay from outbox.replay_exception o
                                     where o.id < (select min(e.id) from outbox.event e) order by o.id limit 1000)
        returning 1
    )
    select count(*) from gone
$$;

-- As in version 8. `passed_by` is counted by the settlements. Where an earlier version settled some of the events, it is
-- the rest of a replay that is done.
create or replace function outbox.replays(wanted bigint default null, unfinished boolean default false, most integer default 100)
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
           outbox.loadable_time(r.until), cardinality(r.uids), r.rate,
           greatest(r.counted, n.delivered + n.failed + coalesce(b.passed_by, 0)),
           r.counted_upto >= r.upto_id, n.delivered, n.failed, n.waiting, r.dropped,
           coalesce(b.passed_by, case when r.state = 'done' then greatest(r.counted - n.delivered - n.failed, 0) end),
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
     cross join lateral (select outbox.replay_passed_by(r) as passed_by) b
     order by r.id desc
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Why
-- ---------------------------------------------------------------------------------------------------------

-- The outcome of an event that a replay means. `settled` is true if the destination has received it: by the replay, or as
-- a dead letter that was given to the target, once the target has neither a row nor a mark of it.
--
-- The first that holds: an exception · a row that the position has passed · not passed by the position · delivered, if every
-- settlement came with the events that it passed by · by its recorded attempt, the target's row or the counts, if not.
create function outbox.replay_outcome(
    r outbox.replay, event_id bigint, event_shard smallint, event_uid uuid,
    out outcome text, out reason text, out settled boolean
)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with found as (
        select x.outcome as exception, x.reason, o.state as row_state,
               r.state = 'done' or case when r.cleared then r.end_ids[event_shard + 1]
                                        else (select p.last_id from outbox.replay_places(r.id) p where p.shard = event_shard)
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
                    when f.covered and event_id > coalesce(r.unknown_upto[event_shard + 1], 0)
                         and outbox.replay_passed_by(r) is not null then 'delivered'
                    when exists (select from outbox.attempt a
                                  where a.uid = event_uid and a.id = event_id and a.outcome = 'delivered'
                                    and a.detail ->> 'replay' = r.id::text) then 'delivered'
                    when exists (select from outbox.delivery d
                                  where d.id = event_id and d.sink = r.target and d.replay = r.id) then 'failed'
                    when r.state = 'done' and r.unknown_upto is null and r.counted = outbox.replay_delivered(r) then 'delivered'
                    else 'unknown' end as outcome
          from found f
    )
    select j.outcome, j.reason, j.outcome = 'delivered' or coalesce(j.exception = 'failed', false)
      from judged j
$$;

-- The newest 20 replays that mean an event of the log, by the sink to which they deliver it, as {"id", "state", "outcome",
-- "reason"}; and whether the destination has received it by one of the newest 1,000. Those from before a rebase are left
-- out: ids and transactions had other numbers then.
create function outbox.replay_outcomes(wanted uuid) returns table (sink text, replays jsonb, delivered boolean, settled boolean)
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
             order by r.id desc
             limit 1000
          ) m
         cross join lateral outbox.replay_outcome(m.replay, m.event_id, m.shard, m.uid) o
      ) n
     group by n.target
$$;

alter function outbox.event_states(uuid) rename to passage_states;

-- The state of an event in each sink, as outbox.passage_states finds it, with the replays that mean the event. An event that
-- the sink itself has not delivered is settled if a replay has.
create function outbox.event_states(wanted uuid) returns table (sink text, state text, details jsonb)
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select s.sink, case when s.mended then 'settled' else s.state end,
           case when s.mended then '{}' else s.details end
           || case when s.delivered and s.details ? 'again' then jsonb_build_object('again', true) else '{}' end
           || case when s.replays is null then '{}' else jsonb_build_object('replays', s.replays) end
      from (
        select p.sink, p.state, p.details, r.replays, r.delivered,
               coalesce(r.settled, false)
                   and (p.state in ('not routed', 'passed over')
                        or p.state = 'unknown' and p.details ->> 'reason' <> 'rebase needed') as mended
          from outbox.passage_states(wanted) p
          left join outbox.replay_outcomes(wanted) r on r.sink = p.sink
      ) s
$$;

-- As in version 8.
create or replace function outbox.why(wanted uuid) returns json
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
                                                         order by s.sink)
                                    from outbox.event_states(wanted) s), '{}'))
      from known k
     order by k.place
     limit 1
$$;

drop function outbox.replays_of(uuid);
