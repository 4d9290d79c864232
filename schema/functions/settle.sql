-- One settlement of a sink, whole or not at all: new rows of `delivery`, then positions.
--
-- `shards`, `epochs` and `places` have one entry per shard that moved: the place, from 1, of its position in the arrays behind
-- them. Every array of the next group has one entry per new row, of the last one per shard of those rows. Rows are copied from
-- the log. If there are rows, the fence comes first: each of their shards must still have this owner and epoch, and stays so
-- until this commits, because a claim passes by rows that are locked. Returns false, and has written nothing, when the fence
-- fails. Positions alone need no fence: what they say is true whichever relay says it, and the epoch ranks them.
--
-- No row is made of an erased event: the settlement fails, and a session that begins again does not read the event any more. A
-- row that was there counts although it is finished while this waits or runs, as after a restore or a seek, when an event may be
-- read whose row is there already.
--
-- With `due_in` null an event is due at its own time, later by its part of the sink's spread_seconds.
create or replace function outbox_internal.settle(
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
set jit = off
as $$
#variable_conflict use_column
declare
    mine integer;
    wanted integer;
    added_rows integer;
    former bigint[];
    former_rows integer;
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
        select count(distinct r.id) into wanted from unnest(ids) r (id);
        with added as (
            insert into outbox.delivery (
                sink, id, shard, state, ordered, due_at, attempts, claims, lease, lease_until, owner, last_error, last_status,
                last_attempt_at, last_attempt, uid, type, key, payload, content_type, headers, deliver_at, created_at, emitter,
                tenant
            )
            select sink_name, e.id, e.shard, r.state, r.ordered,
                   coalesce(clock_timestamp() + r.due_in * interval '1 second', t.due_at, e.deliver_at, clock_timestamp()),
                   r.attempts, r.claims, r.lease, clock_timestamp() + r.lease_for * interval '1 second',
                   case when r.lease is not null then owner_id end, r.error, r.status,
                   case when r.attempts > 0 or r.lease is not null or r.last_attempt is not null then clock_timestamp() end,
                   r.last_attempt::jsonb,
                   e.uid, e.type, e.key, e.payload, coalesce(e.content_type, 'application/json'), e.headers,
                   coalesce(t.due_at, e.deliver_at), e.created_at, e.emitter,
                   case when octet_length(e.tenant) <= 255 then e.tenant end
              from unnest(ids, states, ordereds, due_in, attempt_counts, claim_counts, leases, lease_for, errors, statuses,
                          last_attempts)
                   r (id, state, ordered, due_in, attempts, claims, lease, lease_for, error, status, last_attempt)
              join outbox.event e on e.id = r.id and not outbox_internal.is_erased(e.content_type, e.payload)
             cross join lateral (
                select case when r.due_in is null and r.state = 'waiting' and e.deliver_at is not null
                            then e.deliver_at + outbox_internal.spread_of(sink_name, e.uid) end as due_at
             ) t
            on conflict (sink, id) do nothing returning id
        ),
        total as (select count(*) as n from added)
        -- The rows that this statement saw before it added any. By the uid, too: after a restore two events may have the
        -- same id. Not joined: a plan made while there was no row would go through all rows of the sink for each id.
        select t.n, case when t.n < wanted
                         then array(select d.id from outbox.delivery d
                                     where d.sink = sink_name and d.id = any (ids) and d.id not in (select a.id from added a)
                                       and exists (select from outbox.event e
                                                    where e.id = d.id and e.uid = d.uid and e.created_at = d.created_at))
                         else '{}' end
          into added_rows, former
          from total t;
        former_rows := cardinality(former);
        if added_rows + former_rows < wanted then
            raise exception 'outbox_internal.settle: % of % events are no longer in the log', wanted - added_rows - former_rows, wanted;
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

-- Refuse to leave a shard of a sink without a position: relays would deliver nothing of it. What the owner does, its
-- functions among it, is not looked at: a rebase writes new positions.
create or replace function outbox_internal.keep_positions() returns trigger
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    lost record;
    names text[];
begin
    if pg_has_role(current_user, (select c.relowner from pg_class c where c.oid = tg_relid), 'usage') then
        return null;
    end if;
    names := array(select distinct g.sink from gone g);
    -- The rows that are left are looked at first: after a trim it is a row or two for each shard, while thousands may
    -- be gone.
    select count(*) as shards, min(m.sink) as sink into lost
      from (
        select k.name as sink, n.shard::smallint as shard
          from outbox.sink k cross join generate_series(0, 63) n (shard)
         where k.name = any (names)
        except
        select k.name, u.shard
          from outbox.sink k
         cross join lateral (
            select r.shards from outbox.progress r where r.sink = k.name and r.seq >= k.ledger_start offset 0
         ) p
         cross join lateral unnest(p.shards) u (shard)
         where k.name = any (names)
      ) m
     where exists (select from gone g where g.sink = m.sink and m.shard = any (g.shards));
    if lost.shards > 0 then
        raise exception using errcode = 'restrict_violation',
            message = format('%s shards would have no position, of sink %s among others: nothing of them would be delivered',
                             lost.shards, quote_ident(lost.sink)),
            hint = 'Only positions that newer ones outrank may be deleted.';
    end if;
    return null;
end
$$;

-- Delete rows of the ledger that are outranked for each of their shards, and return their number. The `most` (1,000; at most
-- 10,000) oldest rows of each sink are compared with each other, so that one call is bounded, and a sink that does not advance
-- does not hold back the others. A row that is outranked by one of them is outranked. Rows are never updated, so each keeps its
-- place.
create or replace function outbox_internal.trim_progress(most integer) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    removed bigint;
begin
    delete from outbox.progress p
     where p.ctid = any (array(
            with oldest as materialized (
                select o.ctid as place, o.sink, o.seq, o.shards, o.epochs
                  from outbox.sink k
                 cross join lateral (
                    select g.ctid, g.sink, g.seq, g.shards, g.epochs from outbox.progress g
                     where g.sink = k.name and g.seq >= k.ledger_start
                     order by g.seq
                     limit least(greatest(coalesce(most, 1000), 1), 10000)
                 ) o
            ),
            standing as materialized (
                select distinct on (o.sink, u.shard) o.place
                  from oldest o cross join lateral unnest(o.shards, o.epochs) u (shard, epoch)
                 order by o.sink, u.shard, u.epoch desc, o.seq desc
            )
            select o.place from oldest o except select n.place from standing n));
    get diagnostics removed = row_count;
    return removed;
end
$$;

-- Let ledgers start at their first positions where at least `ahead` (2,000) numbers lie before these. Return true if it should
-- be called again soon: it was cut short, or others had locked what it needs. It waits at most 5 ms for a lock. Nothing is done
-- while the table is smaller than `small` bytes (8 MiB).
--
-- A call passes by trimmed positions for about 20 ms, and once more under the lock: a ledger may start anywhere before its first
-- position. Sinks take turns, since those whose ledgers start at the smallest numbers come first.
--
-- A session takes the number of a position after it has locked the table for INSERT. So under the lock of this function no
-- session has a number whose position it has not committed, and each later position has a larger number, unless sessions keep
-- numbers (CACHE). What was committed before the lock is seen after it: this needs READ COMMITTED.
create or replace function outbox_internal.raise_ledger_starts(ahead bigint default null, small bigint default null) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set lock_timeout = '5ms'
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    fewest constant bigint := greatest(coalesce(ahead, 2000), 1);
    -- A step over numbers that other sinks have passes by nothing, and the next one may meet a dead version at each number.
    longest constant bigint := 20000;
    until constant timestamptz := clock_timestamp() + interval '20 milliseconds';
    sink record;
    step bigint;
    reached bigint;
    first bigint;
    newest bigint;
    names text[] := '{}';
    targets bigint[] := '{}';
    is_behind boolean := false;
begin
    perform outbox_internal.begin_action('outbox_internal.raise_ledger_starts');
    -- The locks last until the commit, which need not wait for a standby.
    perform set_config('synchronous_commit', 'local', true);
    begin
        if pg_relation_size('outbox.progress') < coalesce(small, 8388608) or exists (
            select from pg_sequence q
             where q.seqrelid = pg_get_serial_sequence('outbox.progress', 'seq')::regclass and q.seqcache > 1) then
            return false;
        end if;
        -- In this order everything locks sinks and positions.
        lock table outbox.sink in row exclusive mode nowait;
        for sink in select k.name, k.ledger_start from outbox.sink k order by k.ledger_start, k.name loop
            if cardinality(names) > 0 and clock_timestamp() > until then
                is_behind := true;
                exit;
            end if;
            reached := sink.ledger_start;
            newest := (select p.seq from outbox.progress p
                        where p.sink = sink.name and p.seq >= reached order by p.seq desc limit 1);
            continue when newest is null or newest - reached < fewest;
            -- A session that has locked a sink may wait for this one, so that sink is left for another call.
            perform from outbox.sink k where k.name = sink.name for no key update skip locked;
            if not found then
                is_behind := true;
                continue;
            end if;
            step := 5000;
            loop
                first := (select p.seq from outbox.progress p
                           where p.sink = sink.name and p.seq >= reached and p.seq < reached + step order by p.seq limit 1);
                exit when first is not null or reached + step > newest;
                reached := reached + step;
                if clock_timestamp() > until then
                    is_behind := true;
                    exit;
                end if;
                step := least(step * 2, longest);
            end loop;
            if coalesce(first, reached) - sink.ledger_start >= fewest then
                names := names || sink.name;
                targets := targets || coalesce(first, reached);
            end if;
        end loop;
        if cardinality(names) = 0 then
            return is_behind;
        end if;
        lock table outbox.progress in share mode;
        update outbox.sink k
           set ledger_start = coalesce(
                   (select p.seq from outbox.progress p
                     where p.sink = k.name and p.seq >= k.ledger_start and p.seq < t.target order by p.seq limit 1), t.target)
          from unnest(names, targets) t (name, target)
         where k.name = t.name and k.ledger_start < t.target;
    exception when lock_not_available then
        return true;
    end;
    return is_behind;
end
$$;

