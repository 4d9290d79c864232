-- While a session holds a snapshot, VACUUM removes no version of a row that has died since. The statements that relays repeat
-- look at few of them. Relays of earlier versions work on this schema.

lock table outbox.sink, outbox.shard, outbox.progress in access exclusive mode;

-- ---------------------------------------------------------------------------------------------------------
-- Leases
-- ---------------------------------------------------------------------------------------------------------

-- Leaves no version in a HOT chain. Otherwise no plan would use the index that follows for as long as a transaction lasts that
-- has begun to write before it.
do $$
begin
    if exists (select from outbox.shard) then
        cluster outbox.shard using shard_pkey;
        alter table outbox.shard set without cluster;
    end if;
end
$$;

-- All versions of a row but its last few have an older `lease_until`, so a condition on it leaves them out. Of an expression, by
-- which statements also join and sort: the primary key, which is smaller, is no choice for any plan then.
create index shard_lease on outbox.shard ((sink || ''), lease_until);

-- The duration of leases, in seconds: what is asked for or, while there are many versions that VACUUM has not removed, up to 60.
-- Each renewal adds one for each shard, and a new entry of the primary key passes by all of that shard. The number of versions is
-- asked for only if the table is large: in PostgreSQL 14 the answer takes long.
create function outbox.lease_term(lease_for double precision) returns double precision
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when pg_relation_size('outbox.shard') < 16777216 then lease_for
                else greatest(lease_for,
                              least(60, lease_for * pg_stat_get_dead_tuples('outbox.shard'::regclass)
                                        / greatest(200000, 20 * pg_stat_get_live_tuples('outbox.shard'::regclass))))
           end
$$;

-- Renew the leases of these shards that this owner has at these epochs, and return the seconds until each ends. While leases last
-- longer than `lease_for` (at most 600) seconds, those are left alone of which half, and a third of `lease_for`, is left.
--
-- A relay believes in `lease_for` seconds at most. So a renewal that takes effect late, after its relay has given up the wait,
-- may make a lease shorter: it still lasts for longer than the relay believes.
create function outbox.renew_shards(
    owner_id uuid, sinks text[], shards smallint[], epochs bigint[], lease_for double precision
) returns table (sink text, shard smallint, epoch bigint, lease_seconds double precision)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_nestloop = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
    names constant text[] := array(select distinct n.name from unnest(sinks) n (name));
    second constant interval := '1 second';
    seconds constant double precision := least(greatest(coalesce(lease_for, 0), 0), 600);
    term constant double precision := outbox.lease_term(seconds);
    since constant timestamptz := now() - seconds * second;
    -- Between these a lease is not renewed. Longer ones were written while the clock was ahead.
    enough constant timestamptz := now() + (term / 2 + seconds / 3) * second;
    longest constant timestamptz := now() + greatest(seconds, 60) * second;
    found_rows integer;
begin
    return query
    with held as materialized (
        select c.sink, c.shard, c.epoch, c.lease_until, term > seconds and c.lease_until between enough and longest as stays
          from outbox.shard c
          join unnest(sinks, shards, epochs) k (sink, shard, epoch)
            on k.sink = (c.sink || '') and k.shard = c.shard and k.epoch = c.epoch
         where (c.sink || '') = any (names) and c.lease_until > since and c.owner = owner_id
    ),
    due as materialized (
        select c.sink, c.shard, c.epoch
          from outbox.shard c
          join held h on h.sink = (c.sink || '') and h.shard = c.shard and not h.stays
         where (c.sink || '') = any (names) and c.lease_until > since and c.owner = owner_id
         order by (c.sink || ''), c.shard
           for no key update of c
    ),
    renewed as (
        update outbox.shard s
           set lease_until = clock_timestamp() + term * second
          from held h
          join due d on d.sink = h.sink and d.shard = h.shard and d.epoch = h.epoch
         where (s.sink || '') = any (names) and s.lease_until > since and (s.sink || '') = d.sink and s.shard = d.shard
        returning s.sink, s.shard, s.epoch, s.lease_until
    )
    select h.sink, h.shard, h.epoch,
           extract(epoch from coalesce(r.lease_until, h.lease_until) - clock_timestamp())::double precision
      from held h
      left join renewed r on r.sink = h.sink and r.shard = h.shard and r.epoch = h.epoch
     where h.stays or r.sink is not null;
    get diagnostics found_rows = row_count;
    if found_rows >= cardinality(sinks) or term > seconds then
        return;
    end if;
    -- Those that ended long ago, such as all of them after the clock was set forward. This passes by all versions: while there
    -- are many, such leases are lost, or one that is lost would delay the renewal of all others.
    return query
    with lapsed as materialized (
        select c.sink, c.shard, c.epoch
          from outbox.shard c
         where (c.sink || '') = any (names) and c.lease_until <= since and c.owner = owner_id
         order by (c.sink || ''), c.shard
           for no key update of c
    )
    update outbox.shard s
       set lease_until = clock_timestamp() + seconds * second
      from unnest(sinks, shards, epochs) k (sink, shard, epoch)
      join lapsed l on l.sink = k.sink and l.shard = k.shard and l.epoch = k.epoch
     where (s.sink || '') = any (names) and s.lease_until <= since and (s.sink || '') = l.sink and s.shard = l.shard
    returning s.sink, s.shard, s.epoch, seconds;
end
$$;

-- The number of the shards of a sink whose lease has not ended.
create function outbox.leased_shards(sink_name text) returns integer
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
begin
    return (select count(*) from outbox.shard s where (s.sink || '') = sink_name and s.lease_until > now());
end
$$;

-- As in version 13, by outbox.leased_shards: shards without a lease have many dead versions.
create or replace function outbox.figures_of_sinks() returns table (
    sink text, patterns text[], paused boolean, unowned integer, position_lag double precision
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
begin
    return query
    with place as materialized (
        select s.sink, min(case when s.b_seq is null then s.a_seq else greatest(s.a_seq, s.last_id) end) as id
          from outbox.standing s where s.sink < '~' collate "C" group by s.sink
    )
    select k.name, k.patterns, k.paused,
           64 - outbox.leased_shards(k.name),
           coalesce(greatest(extract(epoch from clock_timestamp() - outbox.loadable_time(e.created_at)), 0), 0)
               ::double precision
      from outbox.sink k
      left join place p on p.sink = k.name
      left join lateral (
        select l.created_at from outbox.event l where l.id > p.id order by l.id limit 1
      ) e on true
     order by k.name
     limit 1000;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Positions
-- ---------------------------------------------------------------------------------------------------------

alter table outbox.sink add column ledger_start bigint not null default 0;
comment on column outbox.sink.ledger_start is
    'The positions of this sink with a smaller seq are gone. Readers of the ledger begin here, behind their dead versions.';

-- The position of each shard. As in version 1, from the start of the ledger of its sink. With OFFSET, so that no plan reads the
-- ledger before it knows where that starts.
create or replace view outbox.standing as
select distinct on (k.name, u.shard)
       k.name as sink, u.shard, u.epoch, p.seq, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, p.last_id
  from outbox.sink k
 cross join lateral (select g.* from outbox.progress g where g.sink = k.name and g.seq >= k.ledger_start offset 0) p
 cross join lateral unnest(p.shards, p.epochs) u (shard, epoch)
 order by k.name, u.shard, u.epoch desc, p.seq desc;

-- The positions of these shards of a sink.
create function outbox.positions(sink_name text, of_shards smallint[]) returns table (
    shard smallint, a_seq bigint, a_snapshot text, a_next bigint, b_seq bigint, b_snapshot text, b_next bigint, last_id bigint
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
begin
    return query
    select p.shard, p.a_seq, p.a_snapshot::text, p.a_next, p.b_seq, p.b_snapshot::text, p.b_next, p.last_id
      from outbox.standing p
     where p.sink = sink_name and p.shard = any (of_shards);
end
$$;

-- Delete rows of the ledger that are outranked for each of their shards, and return their number. The `most` (1,000; at most
-- 10,000) oldest rows of each sink are compared with each other, so that one call is bounded, and a sink that does not advance
-- does not hold back the others. A row that is outranked by one of them is outranked. Rows are never updated, so each keeps its
-- place.
create function outbox.trim_progress(most integer) returns bigint
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
create function outbox.raise_ledger_starts(ahead bigint default null, small bigint default null) returns boolean
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
    perform outbox.require_read_committed('outbox.raise_ledger_starts');
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

-- As in version 2, from the start of the ledger of each sink.
create or replace function outbox.keep_positions() returns trigger
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

-- Called for each trim of the ledger, whose settings hold for its triggers too.
alter function outbox.keep_late() set enable_hashjoin = on;

-- As in version 32, from the start of the ledger of each sink, and without its shards, which have many dead versions.
create or replace function outbox.trim_passes() returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_hashjoin = on
set enable_seqscan = off
set jit = off
as $$
declare
    most constant integer := 10;
    stays constant interval := interval '1 hour';
    removed bigint;
begin
    with kept as materialized (
        select coalesce((select min(e.id) from outbox.event e), 9223372036854775807) as lowest,
               coalesce((select e.xid from outbox.event e order by e.xid limit 1), '9223372036854775807') as oldest,
               m.floor
          from outbox.meta m
    ),
    places as materialized (
        select n.*, lead(n.begins_at) over w as next_begins_at, lead(n.begins_in) over w as next_begins_in,
               lead(n.begun_at) over w as next_begun_at, lead(n.epoch) over w as next_epoch,
               coalesce(n.end_seq, lead(n.begun_seq) over w) as final_seq
          from (select k.name as sink, m::smallint as shard from outbox.sink k cross join generate_series(0, 63) m) s
         cross join lateral (
            select p.sink, p.shard, p.seq, p.epoch, p.begun_at, p.begun_seq, p.ended_at, p.end_seq,
                   greatest(p.a_seq, p.b_seq, p.last_id) as begins_at,
                   outbox.newest_xid(p.a_snapshot, p.b_snapshot) as begins_in,
                   greatest(p.end_a_seq, p.end_b_seq, p.end_last_id) as ends_at,
                   outbox.newest_xid(p.end_a_snapshot, p.end_b_snapshot) as ends_in
              from outbox.sink_pass p
             where p.sink = s.sink and p.shard = s.shard
             order by p.seq
             limit most + 1
         ) n
        window w as (partition by n.sink, n.shard order by n.seq)
    ),
    -- Of the passes that are looked at. Nearly all rows of the ledger are at these epochs.
    newest as materialized (
        select k.sink, array(select coalesce(max(n.epoch), 0)
                               from generate_series(0, 63) of_shard left join places n on n.sink = k.sink and n.shard = of_shard
                              group by of_shard order by of_shard) as epochs
          from (select distinct n.sink from places n where n.next_epoch is not null) k
    ),
    late as (
        select l.sink, l.shard, l.epoch, l.seq, greatest(l.a_seq, l.b_seq, l.last_id) as ends_at,
               outbox.newest_xid(l.a_snapshot, l.b_snapshot) as ends_in
          from outbox.late_position l
        union all
        -- Those that outbox.keep_late will keep when the ledger is trimmed.
        select g.sink, u.shard, u.epoch, g.seq, greatest(g.a_seq, g.b_seq, g.last_id),
               outbox.newest_xid(g.a_snapshot, g.b_snapshot)
          from newest c
          join outbox.sink k on k.name = c.sink
         cross join lateral (select p.* from outbox.progress p where p.sink = k.name and p.seq >= k.ledger_start offset 0) g
         cross join lateral unnest(g.shards, g.epochs) u (shard, epoch)
         where u.epoch < c.epochs[u.shard + 1]
    ),
    held as (
        select distinct n.sink, n.shard, n.seq
          from places n
          join late l on l.sink = n.sink and l.shard = n.shard and l.epoch >= n.epoch and l.epoch < n.next_epoch
                         and l.seq > n.final_seq
         cross join kept k
         where l.ends_at >= k.lowest or l.ends_in > k.oldest
    ),
    judged as (
        select n.sink, n.shard, n.seq,
               bool_and(coalesce(k.lowest > k.floor and n.next_begins_at < k.lowest and n.next_begins_in <= k.oldest
                                 and (n.ended_at is null or n.ends_at < k.lowest and n.ends_in <= k.oldest)
                                 and h.seq is null
                                 -- A time in the future is of a clock that has been set back since.
                                 and n.next_begun_at not between clock_timestamp() - stays and clock_timestamp() + stays, false))
                   over (partition by n.sink, n.shard order by n.seq) as past
          from places n
          left join held h on h.sink = n.sink and h.shard = n.shard and h.seq = n.seq
         cross join kept k
    )
    delete from outbox.sink_pass p
     using judged j
     where p.sink = j.sink and p.shard = j.shard and p.seq = j.seq and j.past;
    get diagnostics removed = row_count;
    delete from outbox.sink_patterns t
     where not exists (select from outbox.sink_pass p where p.sink = t.sink and p.generation = t.generation)
       and not exists (select from outbox.shard s where s.sink = t.sink and s.generation = t.generation)
       and not exists (select from outbox.sink k where k.name = t.sink and k.generation = t.generation);
    delete from outbox.row_ahead w
     where (w.sink, w.id) in (select o.sink, o.id from outbox.row_ahead o
                               where o.id < (select min(e.id) from outbox.event e) limit 1000);
    -- A rename locks these before the passes.
    delete from outbox.late_position l
     where l.ctid = any (array(
            select o.ctid from outbox.late_position o
             where greatest(o.a_seq, o.b_seq, o.last_id) < (select min(e.id) from outbox.event e)
               and outbox.newest_xid(o.a_snapshot, o.b_snapshot)
                   <= (select e.xid from outbox.event e order by e.xid limit 1)
               and (select m.floor from outbox.meta m) < (select min(e.id) from outbox.event e)
             limit 1000
               for update skip locked));
    return removed;
end
$$;

-- As in version 7, from the start of the ledger.
create or replace function outbox.passage(
    sink_name text, event_shard smallint, event_id bigint, event_xid xid8, event_type text,
    out passed boolean, out covered boolean, out routed boolean, out reading boolean, out doubtful boolean,
    out over_by text, out over_at timestamptz, out forgotten boolean
)
language sql stable
set search_path = pg_catalog, pg_temp
set jit = off
as $$
    with ledger as materialized (
        select p.seq, p.epochs[array_position(p.shards, event_shard)] as epoch,
               outbox.position_passed(event_id, event_xid, p.a_seq, p.a_snapshot, p.a_next, p.b_snapshot, p.last_id,
                                      m.floor) as passed
          from outbox.sink k
         cross join lateral (select g.* from outbox.progress g where g.sink = k.name and g.seq >= k.ledger_start offset 0) p
         cross join outbox.meta m
         where k.name = sink_name and event_shard = any (p.shards)
    ),
    place as materialized (
        select coalesce((select l.passed from ledger l order by l.epoch desc, l.seq desc limit 1), false) as passed
    ),
    late as materialized (
        select v.seq
          from outbox.pass_spans(sink_name, event_shard) v
         where exists (select from ledger l
                        where l.passed and l.epoch >= v.epoch and l.epoch < v.next_epoch and l.seq > v.final_seq)
            or exists (select from outbox.late_position l
                        where l.sink = sink_name and l.shard = event_shard and l.epoch >= v.epoch and l.epoch < v.next_epoch
                          and outbox.position_passed(event_id, event_xid, l.a_seq, l.a_snapshot, l.a_next, l.b_snapshot,
                                                     l.last_id, (select m.floor from outbox.meta m)))
    ),
    bounds as (
        select p.seq, p.kind, p.generation, p.begun_at, p.ended_at, p.more_rows,
               outbox.position_passed(event_id, event_xid, p.a_seq, p.a_snapshot, p.a_next, p.b_snapshot, p.last_id,
                                      m.floor) as at_begin,
               case when p.ended_at is not null
                    then outbox.position_passed(event_id, event_xid, p.end_a_seq, p.end_a_snapshot, p.end_a_next,
                                                p.end_b_snapshot, p.end_last_id, m.floor) end as at_end
          from outbox.sink_pass p
         cross join outbox.meta m
         where p.sink = sink_name and p.shard = event_shard
    ),
    passes as (
        select b.seq, b.kind, b.generation, b.begun_at, b.ended_at, b.more_rows, b.at_begin,
               coalesce(b.at_end, lead(b.at_begin) over (order by b.seq), (select l.passed from place l)) as at_end
          from bounds b
    ),
    judged as (
        select p.seq, p.kind, p.begun_at, p.ended_at, p.more_rows and not p.at_end as doubtful,
               p.at_begin and p.kind in ('start', 'seek')
                   and not coalesce(lag(p.at_end) over (order by p.seq), p.kind <> 'start') as passed_over,
               t.patterns is not null
                   and not p.at_begin and (p.at_end or p.seq in (select v.seq from late v)) as covered,
               outbox.type_matches(t.patterns, event_type) as wanted
          from passes p
          left join outbox.sink_patterns t on t.sink = sink_name and t.generation = p.generation
    )
    select (select l.passed from place l),
           coalesce(bool_or(j.covered), false),
           coalesce(bool_or(j.covered and j.wanted), false)
               or exists (select from outbox.row_ahead w where w.sink = sink_name and w.id = event_id),
           coalesce((array_agg(j.wanted and j.ended_at is null order by j.seq desc))[1], false),
           coalesce(bool_or(j.doubtful and j.wanted), false),
           (array_agg(j.kind order by j.seq desc) filter (where j.passed_over))[1],
           (array_agg(j.begun_at order by j.seq desc) filter (where j.passed_over))[1],
           event_id <= (select m.floor from outbox.meta m) and not coalesce(bool_or(j.kind = 'start'), false)
      from judged j
$$;

-- As in version 7, from the starts of the ledgers.
create or replace function outbox.passage_states(wanted uuid) returns table (sink text, state text, details jsonb)
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set jit = off
as $$
    with logged as materialized (
        select e.id, e.shard, e.xid, e.type, e.key, e.deliver_at, e.created_at,
               e.content_type = 'application/x-erased' and coalesce(octet_length(e.payload), 0) = 0 as erased
          from outbox.event e
         where e.uid = wanted
         order by e.id + 0 desc
         limit 1
    ),
    parked as materialized (
        select distinct on (d.sink)
               d.sink, d.id, d.key, d.state, d.ordered, d.deliver_at, d.due_at, d.attempts, d.lease_until, d.owner, d.last_error,
               d.last_status, d.last_attempt_at, outbox.last_attempt_of(d.sink, d.id) as last_attempt, d.since
          from outbox.delivery d
         where d.uid = wanted and (not exists (select from logged) or d.created_at = (select l.created_at from logged l))
         order by d.sink, d.id desc
    ),
    marked as materialized (
        select distinct on (m.sink) m.sink, m.at, m.actor, m.role_name, m.reason
          from outbox.discarded m
         where m.uid = wanted
           and (not exists (select from logged) or m.id = (select l.id from logged l)
                or (select l.id from logged l) <= (select f.floor from outbox.meta f))
         order by m.sink, m.at desc
    ),
    recorded as materialized (
        select r.sink, r.details
          from outbox.recorded_deliveries(wanted, (select l.id from logged l), (select l.created_at from logged l)) r
    ),
    -- After a restore, until the log is rebased, positions say nothing about new events.
    home as materialized (
        select m.system_identifier is distinct from (select c.system_identifier from pg_control_system() c)
                   or exists (select from outbox.sink k
                              cross join lateral (
                                select g.a_seq, g.last_id from outbox.progress g
                                 where g.sink = k.name and g.seq >= k.ledger_start offset 0
                              ) p
                               where greatest(p.a_seq, p.last_id) > coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0))
                   as restored
          from outbox.meta m
    ),
    known as (
        select k.name, l.id, l.type, l.erased, coalesce(l.deliver_at > now(), false) as later,
               l.deliver_at, l.key, l.shard, p.passed, p.covered, p.routed, p.over_by, p.over_at,
               p.doubtful, p.forgotten,
               coalesce(p.reading and o.name is not null, false) as reading, o.name as owner, o.lease_seconds,
               outbox.type_matches(k.patterns, l.type) as wanted, k.paused, k.circuit, k.last_error
          from outbox.sink k
          left join logged l on true
          left join lateral outbox.passage(k.name, l.shard, l.id, l.xid, l.type) p on l.id is not null
          left join lateral (
            select coalesce(n.name, h.owner::text) as name, outbox.in_seconds(h.lease_until - now()) as lease_seconds
              from outbox.shard h left join outbox.relay n on n.id = h.owner
             where h.sink = k.name and h.shard = l.shard and h.owner is not null and h.lease_until > now()
          ) o on true
    ),
    judged as (
        select k.*,
               case when k.erased then 'erased'
                    when d.id is not null and d.lease_until > now() then 'waiting'
                    when d.id is not null then outbox.delivery_state(d.state, d.ordered, d.deliver_at)
                    when m.sink is not null then 'discarded'
                    when (select h.restored from home h) then 'unknown'
                    when (k.wanted or k.reading) and not k.passed then case when k.later then 'scheduled' else 'pending' end
                    when r.sink is not null then 'delivered'
                    when k.routed then 'settled'
                    when k.doubtful or k.forgotten then 'unknown'
                    when k.covered or not k.passed then 'not routed'
                    when k.over_by is not null then 'passed over'
                    else 'unknown' end as state
          from known k
          left join parked d on d.sink = k.name
          left join marked m on m.sink = k.name
          left join recorded r on r.sink = k.name
    ),
    -- The thing that an undelivered event waits for.
    stopped as (
        select j.name,
               jsonb_build_object('behind', b.uid, 'behind_state', b.state) as behind,
               jsonb_build_object('paused', j.paused, 'circuit', j.circuit, 'sink_error', j.last_error) as sink
          from judged j
          left join parked d on d.sink = j.name
          left join lateral (
            select f.uid, f.state
              from outbox.delivery f
             where f.sink = j.name and f.key = coalesce(d.key, j.key) and f.id < coalesce(d.id, j.id) and f.ordered
             order by f.state = 'dead', f.id
             limit 1
          ) b on true
         where j.state in ('pending', 'scheduled', 'waiting', 'held')
    )
    select j.name, j.state,
           case
           when j.state = 'erased' then '{}'
           when d.id is not null then
               case when d.lease_until > now()
                    then jsonb_build_object('relay', coalesce(w.name, d.owner::text),
                                            'lease_seconds', outbox.in_seconds(d.lease_until - now()))
                    else '{}' end
               || case when j.state in ('waiting', 'scheduled')
                       then jsonb_build_object('due_in_seconds', outbox.in_seconds(outbox.loadable_time(d.due_at) - now())) else '{}' end
               || case when j.state in ('waiting', 'held') then s.behind else '{}' end
               || jsonb_build_object(
                      'attempts', d.attempts, 'last_error', d.last_error, 'last_status', d.last_status,
                      'last_attempt', d.last_attempt
                          || jsonb_build_object('seconds_ago', outbox.in_seconds(now() - outbox.loadable_time(d.last_attempt_at))))
               || case when j.state = 'dead'
                       then jsonb_build_object('since_seconds',
                                               outbox.in_seconds(now() - outbox.loadable_time(coalesce(d.last_attempt_at, d.since))))
                       else coalesce(s.sink, '{}') end
           when j.state = 'discarded' then
               jsonb_build_object('at', m.at, 'by', m.actor, 'role', m.role_name, 'reason', m.reason)
           when j.state in ('pending', 'scheduled') then
               case when j.state = 'scheduled'
                    then jsonb_build_object('due_in_seconds', outbox.in_seconds(outbox.loadable_time(j.deliver_at) - now())) else '{}' end
               || jsonb_build_object('owner', j.owner, 'lease_seconds', j.lease_seconds)
               || s.behind || s.sink || jsonb_build_object('again', coalesce(j.routed or r.sink is not null, false))
           when j.state = 'delivered' then r.details
           when j.state = 'passed over' then jsonb_build_object('by', j.over_by, 'at', j.over_at)
           when j.state = 'unknown' then
               jsonb_build_object('reason', case when (select h.restored from home h) then 'rebase needed'
                                                 when j.id is null then 'past retention'
                                                 when j.doubtful then 'too many rows'
                                                 when j.forgotten then 'before a rebase'
                                                 else 'before passes were recorded' end)
           else '{}' end
      from judged j
      left join parked d on d.sink = j.name
      left join marked m on m.sink = j.name
      left join recorded r on r.sink = j.name
      left join stopped s on s.name = j.name
      left join outbox.relay w on w.id = d.owner
     order by j.name
$$;

-- As in version 16, and ledgers start at their beginning: after a partial restore their positions may have any number.
create or replace function outbox.rebase(actor text default null, reason text default null) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    alive text;
    here constant bigint := (select c.system_identifier from pg_control_system() c);
    given_out bigint;
    highest bigint;
    new_floor bigint;
    oldest bigint;
    outranked bigint;
    fence bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'outbox.rebase must see what is committed before it has its locks'
            using errcode = 'invalid_transaction_state', hint = 'Run it in a transaction that is READ COMMITTED.';
    end if;
    select string_agg(format('%s (seen %s s ago)', r.name, round(extract(epoch from clock_timestamp() - r.seen_at))),
                      ', ' order by r.name)
      into alive
      from (select * from outbox.relay where seen_at > clock_timestamp() - interval '30 seconds' limit 20) r;
    if alive is not null then
        raise exception using errcode = 'object_in_use',
            message = format('relays are running: %s; stop every relay first', alive),
            hint = 'A relay that crashed counts as running for 30 seconds.';
    end if;
    lock table outbox.event, outbox.sink, outbox.shard, outbox.progress, outbox.delivery in access exclusive mode;
    update outbox.sink set ledger_start = 0 where ledger_start > 0;
    given_out := coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0);
    highest := greatest(
        given_out,
        (select max(e.id) from outbox.event e),
        (select max(d.id) from outbox.delivery d),
        (select max(m.id) from outbox.discarded m),
        (select max(greatest(p.a_seq, p.b_seq, p.last_id)) from outbox.progress p),
        (select m.floor from outbox.meta m)
    );
    new_floor := highest;
    if given_out < highest or (
        here is distinct from (select m.system_identifier from outbox.meta m)
        and exists (select from outbox.event e group by e.id having count(*) > 1)
    ) then
        new_floor := highest + outbox.renumber(given_out, highest);
    end if;
    perform setval('outbox.event_id_seq', greatest(new_floor, 1), new_floor > 0);
    oldest := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    outranked := coalesce((select max(p.seq) from outbox.progress p), 0);
    perform setval(q.name, greatest(outranked, 1))
       from (select pg_get_serial_sequence('outbox.progress', 'seq') as name) q
      where outranked >= nextval(q.name);
    fence := outbox.raise_config() << 32;
    update outbox.shard s set epoch = greatest(s.epoch + 1, fence), owner = null, lease_until = clock_timestamp();
    delete from outbox.sink_pass;
    delete from outbox.late_position;
    delete from outbox.row_ahead;
    insert into outbox.shard (sink, shard, epoch)
    select k.name, n, fence from outbox.sink k cross join generate_series(0, 63) n
        on conflict do nothing;
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select k.name, u.shards, e.epochs, u.upto_id, '3:3:', 3,
           new_floor, '9223372036854775807:9223372036854775807:', oldest, 0
      from outbox.sink k
     cross join lateral outbox.settled_upto(k.name) u
     cross join lateral (
        select array_agg(s.epoch order by s.shard) as epochs from outbox.shard s
         where s.sink = k.name and s.shard = any (u.shards)
     ) e;
    delete from outbox.progress p where p.seq <= outranked;
    update outbox.day
       set checked_snapshot = null, archived_to = null, sha256 = null, events = null, archived_snapshot = null,
           archived_before = null, archived_on = null
     where emptied_at is null;
    update outbox.meta m
       set floor = new_floor, floor_xid = oldest, system_identifier = here,
           min_relay = case when exists (select from outbox.discarded) then greatest(m.min_relay, 3) else m.min_relay end;
    perform outbox.record_action('rebase', null, jsonb_build_object('floor', new_floor), 1, actor,
                                  nullif(trim(reason), ''));
    return new_floor;
end
$$;
