-- Passes stay while their owners may have delivered, or may yet deliver, an event that the log keeps. Relays of earlier versions
-- work on this schema.

-- As in version 7. A pass stays for an hour after the next one has begun, and while a position of its owners is kept that they
-- wrote after its end: an owner that has not noticed a seek, or was suspended, settles what it has delivered, and only the
-- pass says under which patterns it did.
create or replace function outbox.trim_passes() returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
    most constant integer := 10;
    removed bigint;
begin
    delete from outbox.late_position l
     where l.ctid = any (array(
            select o.ctid from outbox.late_position o
             where greatest(o.a_seq, o.b_seq, o.last_id) < (select min(e.id) from outbox.event e)
               and outbox.newest_xid(o.a_snapshot, o.b_snapshot)
                   <= (select e.xid from outbox.event e order by e.xid limit 1)
               and (select m.floor from outbox.meta m) < (select min(e.id) from outbox.event e)
             limit 1000));
    with kept as materialized (
        select coalesce((select min(e.id) from outbox.event e), 9223372036854775807) as lowest,
               coalesce((select e.xid from outbox.event e order by e.xid limit 1), '9223372036854775807') as oldest,
               m.floor
          from outbox.meta m
    ),
    places as (
        select n.*, lead(n.begins_at) over w as next_begins_at, lead(n.begins_in) over w as next_begins_in,
               lead(n.begun_at) over w as next_begun_at, lead(n.epoch) over w as next_epoch
          from outbox.shard s
         cross join lateral (
            select p.sink, p.shard, p.seq, p.epoch, p.begun_at, p.ended_at,
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
    judged as (
        select n.sink, n.shard, n.seq,
               bool_and(coalesce(k.lowest > k.floor and n.next_begins_at < k.lowest and n.next_begins_in <= k.oldest
                                 and n.next_begun_at < clock_timestamp() - interval '1 hour'
                                 and (n.ended_at is null or n.ends_at < k.lowest and n.ends_in <= k.oldest)
                                 and not exists (select from outbox.late_position l
                                                  where l.sink = n.sink and l.shard = n.shard
                                                    and l.epoch >= n.epoch and l.epoch < n.next_epoch), false))
                   over (partition by n.sink, n.shard order by n.seq) as past
          from places n
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
    return removed;
end
$$;
