-- While a session holds a snapshot, VACUUM removes no version of a row that has died since. The statements that relays repeat
-- pass by dead versions of positions and leases. Relays of earlier versions work on this schema.

lock table outbox.sink, outbox.shard in access exclusive mode;

-- ---------------------------------------------------------------------------------------------------------
-- Leases
-- ---------------------------------------------------------------------------------------------------------

-- All versions of a row but its last few have an older `lease_until`, so a condition on it leaves them out. Of an expression, so
-- that the primary key is no choice: a plan may have been made before there were dead versions.
create index shard_lease on outbox.shard ((sink || ''), lease_until);

-- The duration of leases, in seconds: what is asked for or, while there are many versions that VACUUM cannot remove, up to 300.
-- Each renewal adds one for each shard, and an entry in the primary key passes by all of them.
create function outbox.lease_term(lease_for double precision) returns double precision
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select greatest(lease_for, least(300, lease_for * pg_stat_get_dead_tuples('outbox.shard'::regclass) / 200000))
$$;

-- Renew the leases of these shards that this owner has at these epochs and that ended less than `lease_for` (at most 600) seconds
-- ago, if a third of their time has passed. Return these and the others that it still has, and the seconds until each ends.
--
-- No lease is made shorter: its owner may have given up the wait for this call, and believe in a longer one. An owner believes in
-- 300 seconds or `lease_for` at most, because outbox-relay caps longer leases, which were written while the clock was ahead.
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
    longest constant double precision := greatest(seconds, 300);
    since constant timestamptz := now() - seconds * second;
    fresh constant timestamptz := now() + (term * 2 / 3 + seconds / 6) * second;
begin
    return query
    with held as materialized (
        select c.sink, c.shard, c.epoch, c.lease_until
          from outbox.shard c
          join unnest(sinks, shards, epochs) k (sink, shard, epoch)
            on k.sink = c.sink and k.shard = c.shard and k.epoch = c.epoch
         where (c.sink || '') = any (names) and c.lease_until > since and c.owner = owner_id
    ),
    due as materialized (
        select c.sink, c.shard, c.epoch
          from outbox.shard c
         where (c.sink || '') = any (names) and c.lease_until > since and c.lease_until < fresh and c.owner = owner_id
         order by c.sink, c.shard
           for no key update of c
    ),
    renewed as (
        update outbox.shard s
           set lease_until = clock_timestamp() + term * second
          from held h
          join due d on d.sink = h.sink and d.shard = h.shard and d.epoch = h.epoch
         where (s.sink || '') = any (names) and s.lease_until > since and s.sink = d.sink and s.shard = d.shard
        returning s.sink, s.shard, s.epoch, s.lease_until
    )
    select h.sink, h.shard, h.epoch,
           least(longest, extract(epoch from coalesce(r.lease_until, h.lease_until) - clock_timestamp())::double precision)
      from held h
      left join renewed r on r.sink = h.sink and r.shard = h.shard and r.epoch = h.epoch
     where r.sink is not null or h.lease_until >= fresh;
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

-- Let the ledgers of sinks start at their first position, if at least `ahead` (2,000) numbers lie before it, and return the
-- number of such sinks. Nothing is done while the table is smaller than `small` bytes (8 MiB), or while others lock it.
--
-- A session takes the number of a position after it has locked the table for INSERT. So under the lock of this function no
-- session has a number whose position it has not committed, and each later position has a larger number. The update sees what
-- was committed before it got the lock: this needs READ COMMITTED.
create function outbox.raise_ledger_starts(ahead bigint default null, small bigint default null) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    names text[];
    raised integer;
begin
    perform outbox.require_read_committed('outbox.raise_ledger_starts');
    if pg_relation_size('outbox.progress') < coalesce(small, 8388608) then
        return 0;
    end if;
    select array_agg(k.name) into names
      from outbox.sink k
     cross join lateral (
        select p.seq from outbox.progress p where p.sink = k.name and p.seq >= k.ledger_start order by p.seq limit 1
     ) first
     where first.seq - k.ledger_start >= greatest(coalesce(ahead, 2000), 1);
    if names is null then
        return 0;
    end if;
    lock table outbox.progress in share mode;
    -- A session that has locked a sink may wait for this one, so its sink is left for the next call.
    update outbox.sink k
       set ledger_start = first.seq
      from (
        select o.name, o.ledger_start from outbox.sink o where o.name = any (names) order by o.name
           for no key update skip locked
     ) free
     cross join lateral (
        select p.seq from outbox.progress p where p.sink = free.name and p.seq >= free.ledger_start order by p.seq limit 1
     ) first
     where k.name = free.name;
    get diagnostics raised = row_count;
    return raised;
exception when lock_not_available then
    return 0;
end
$$;

-- TRUNCATE can begin the numbers again.
create function outbox.ledger_truncated() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update outbox.sink k set ledger_start = 0 where k.ledger_start > 0;
    return null;
end
$$;

create trigger ledger_truncated after truncate on outbox.progress
for each statement execute function outbox.ledger_truncated();

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

-- As in version 32, from the start of the ledger of each sink.
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
          from outbox.shard s
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
