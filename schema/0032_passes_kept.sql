-- Passes stay while their owners may have delivered, or may yet deliver, an event that the log keeps. Relays of earlier versions
-- work on this schema.

-- As in version 7. A pass stays for an hour after the next one has begun, and while its owners have written a position after
-- its end that has passed an event that is kept: an owner that has not noticed a seek, or was suspended, settles what it has
-- delivered, and only the pass says under which patterns it did.
create or replace function outbox.trim_passes() returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_hashjoin = on
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
          join outbox.progress g on g.sink = c.sink
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

-- As in version 7. The ledger of the sink is trimmed first: a rename copies only the positions that count, and those that were
-- written after the end of a pass are kept when they leave the ledger.
create or replace function outbox.move_passes(sink_name text, new_name text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from outbox.progress p
     where p.sink = sink_name
       and p.seq = any (array(
            select g.seq from outbox.progress g
             where g.sink = sink_name
               and g.seq <> all (array(select n.seq from outbox.standing n where n.sink = sink_name))
               for update skip locked));
    delete from outbox.sink_pass p where p.sink = new_name;
    delete from outbox.sink_patterns p where p.sink = new_name;
    delete from outbox.late_position p where p.sink = new_name;
    delete from outbox.row_ahead p where p.sink = new_name;
    update outbox.sink_pass p set sink = new_name where p.sink = sink_name;
    update outbox.sink_patterns p set sink = new_name where p.sink = sink_name;
    update outbox.late_position p set sink = new_name where p.sink = sink_name;
    update outbox.row_ahead p set sink = new_name where p.sink = sink_name;
end
$$;
