-- After a restore, or a move to another cluster, the transaction numbers that are stored mean nothing to the
-- server, and ids may be given out twice. This makes them harmless; run it while no relay runs. Returns the floor:
-- the largest id or sequence value that is known; the sequence continues above it.
--
-- Every shard gets a last window of the old numbering: from the lowest id that it has not settled, with a tick A in which
-- nothing is visible, to a tick in which everything is visible. So what was emitted between the restore and now is read,
-- whatever its transaction number means in the old numbering, and so is what an earlier window of this kind has left.
-- `b_next` is the oldest transaction that runs now: behind that window the shard is at a tick of the floor
-- and of the snapshot that ends there, with none pending, because no transaction that runs now has an id.
--
-- Shards without a position get one, at the beginning: nothing is known of what they have settled. No archive and no check of
-- a day counts behind it: events that came since would be told from those before by numbers that mean nothing any more.
-- Ledgers start at their beginning: after a partial restore their positions may have any number.
create or replace function outbox.rebase(actor text default null, reason text default null) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    alive text;
    here constant bigint := outbox_internal.home();
    given_out bigint;
    highest bigint;
    new_floor bigint;
    oldest bigint;
    outranked bigint;
    fence bigint;
begin
    perform outbox_internal.begin_action('outbox.rebase');
    select string_agg(format('%s (seen %s s ago)', r.name, round(extract(epoch from clock_timestamp() - r.seen_at))),
                      ', ' order by r.name)
      into alive
      from (select * from outbox.relay where seen_at > clock_timestamp() - interval '30 seconds' limit 20) r;
    if alive is not null then
        raise exception using errcode = 'object_in_use',
            message = format('relays are running: %s; stop every relay first', alive),
            hint = 'A relay that crashed counts as running for 30 seconds.';
    end if;
    -- Who takes an id locks the sequence until the end of his transaction. This waits for those that have one, as the
    -- lock of the log alone does not: an id that was taken before it may belong to a row that is inserted after it.
    alter sequence outbox.event_id_seq no cycle;
    lock table outbox.event, outbox.sink, outbox.shard, outbox.progress, outbox.delivery in access exclusive mode;
    update outbox.sink set ledger_start = 0, home = here;
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
        (here = (select m.system_identifier from outbox.meta m)) is not true
        and exists (select from outbox.event e group by e.id having count(*) > 1)
    ) then
        -- Uids have the old ids, so outbox.uid gets the new ones, and marks of discarded events follow.
        with moved as (
            update outbox.event e
               set id = highest + n.place
              from (
                select l.tableoid as part, l.ctid as row_id, l.id as old_id,
                       row_number() over (order by l.id, l.created_at) as place
                  from outbox.event l
                 where l.id <= given_out
                   and ((l.xmin::text::bigint - (l.xid::text::bigint & 4294967295)) & 4294967295) < 2147483648
              ) n
             where e.tableoid = n.part and e.ctid = n.row_id
            returning e.uid, n.old_id, e.id
        ),
        marks as (
            update outbox.discarded m set id = v.id from moved v where m.uid = v.uid and m.id = v.old_id
        ),
        named as (
            insert into outbox.uid as u (uid, id) select v.uid, max(v.id) from moved v group by v.uid
                on conflict (uid) do update set id = excluded.id
        )
        select highest + count(*) into new_floor from moved;
    end if;
    perform setval('outbox.event_id_seq', greatest(new_floor, 1), new_floor > 0);
    oldest := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    outranked := coalesce((select max(p.seq) from outbox.progress p), 0);
    perform setval(q.name, greatest(outranked, 1))
       from (select pg_get_serial_sequence('outbox.progress', 'seq') as name) q
      where outranked >= nextval(q.name);
    fence := outbox_internal.raise_config() << 32;
    update outbox.shard s set epoch = greatest(s.epoch + 1, fence), owner = null, released_at = clock_timestamp();
    delete from outbox.session;
    delete from outbox.sink_route;
    insert into outbox.shard (sink, shard, epoch)
    select k.name, n, fence from outbox.sink k cross join generate_series(0, 63) n
        on conflict do nothing;
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select k.name, u.shards, e.epochs, u.upto_id, '3:3:', 3,
           new_floor, '9223372036854775807:9223372036854775807:', oldest, 0
      from outbox.sink k
     cross join lateral outbox_internal.settled_upto(k.name) u
     cross join lateral (
        select array_agg(s.epoch order by s.shard) as epochs from outbox.shard s
         where s.sink = k.name and s.shard = any (u.shards)
     ) e;
    delete from outbox.progress p where p.seq <= outranked;
    perform outbox_internal.record_routes(k.name, 'rebase') from outbox.sink k;
    update outbox.day
       set checked_snapshot = null, archived_to = null, sha256 = null, events = null, archived_snapshot = null,
           archived_before = null, archived_on = null
     where emptied_at is null;
    update outbox.meta m
       set floor = new_floor, floor_xid = oldest, system_identifier = here;
    perform outbox_internal.record_action('rebase', null, jsonb_build_object('floor', new_floor), 1, actor,
                                  nullif(trim(reason), ''));
    return new_floor;
end
$$;
comment on function outbox.rebase is
    'After a restore into another cluster, while no relay runs: adapt the log to the transaction numbers of this server. '
    'Returns the id above which new events get theirs.';
