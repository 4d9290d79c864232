-- Odd input, restores and other people's privileges: what an event, a role or a restored cluster may be, and what
-- becomes of it. Relays made for version 1 work on this schema.

-- ---------------------------------------------------------------------------------------------------------
-- Columns and the ceiling
-- ---------------------------------------------------------------------------------------------------------

-- Only rises; raised with every change of what relays are to read. A tick carries it.
alter table outbox.meta add column config bigint not null default 1;
comment on column outbox.meta.config is
    'Counts changes of the configuration and of positions. It only rises, so no older tick can look like a newer one.';
alter table outbox.meta add column system_identifier bigint;
comment on column outbox.meta.system_identifier is
    'The cluster whose transaction numbers the log carries: see outbox.rebase.';
update outbox.meta
   set config = 1 + (select coalesce(max(s.generation), 0) + coalesce(sum(s.generation), 0) from outbox.sink s),
       system_identifier = (select c.system_identifier from pg_control_system() c);

alter table outbox.event add column emitter text;
comment on column outbox.event.emitter is 'The role that emitted the event; null in events of schema version 1.';
alter table outbox.uid add column emitter text;

-- The largest payload in bytes that an event may have. Only the owner of the schema can replace this function
-- (`migrate --max-payload-bytes`). A constant, which takes the place of every call when a statement is planned.
create function outbox.payload_ceiling() returns integer
language sql immutable parallel safe
return 1048576;

-- ---------------------------------------------------------------------------------------------------------
-- emit
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Reading
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Settling and claims of rows
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Ticks and servers
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Sinks, positions and rebase
-- ---------------------------------------------------------------------------------------------------------

-- Raises the counter of the configuration and returns it. It is above every generation, also above one that was written
-- by hand. Whoever raises it holds its row until the end of the transaction, so two changes never see the same value.
create function outbox.raise_config() returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    raised bigint;
begin
    update outbox.meta m
       set config = greatest(m.config, (select max(s.generation) from outbox.sink s)) + 1
    returning m.config into raised;
    return raised;
end
$$;

-- Statements that change sinks by hand raise the counter, too. SECURITY DEFINER: a role that may write sinks need not be
-- able to write the counter.
create function outbox.sink_changed() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox.raise_config();
    return null;
end
$$;

create trigger sink_changed after insert or truncate or update of patterns, generation on outbox.sink
for each statement execute function outbox.sink_changed();

-- A sink that is deleted takes its rows and positions with it: of a later sink of that name they would be taken for its
-- own. Runs after the foreign key has deleted the shards, which waits for settlements that have passed their fence; none
-- passes it afterwards.
create function outbox.sink_deleted() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox.raise_config();
    delete from outbox.delivery d where d.sink = any (array(select r.name from removed r));
    delete from outbox.progress p where p.sink = any (array(select r.name from removed r));
    return null;
end
$$;

create trigger sink_deleted after delete on outbox.sink
referencing old table as removed
for each statement execute function outbox.sink_deleted();

-- A tick. As in version 1, except that `generations` is the counter of the configuration, and that it is refused (OR002)
-- where the transaction numbers of the log are not the server's: no relay of any version reads there before a rebase.
create or replace function outbox.tick(
    out seq bigint, out snapshot pg_snapshot, out next_xid bigint, out incarnation text, out wal bigint,
    out now timestamptz, out generations bigint
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    xmax bigint;
    home bigint;
begin
    if pg_current_xact_id_if_assigned() is not null then
        raise exception 'outbox.tick must be a transaction of its own';
    end if;
    select case when s.is_called then s.last_value else 0 end into seq from outbox.event_id_seq s;
    snapshot := pg_current_snapshot();
    xmax := pg_snapshot_xmax(snapshot)::text::bigint;
    next_xid := xmax + (((3 + age('3'::xid)::bigint) - xmax) & 4294967295);
    -- After the snapshot: who sees the old value has a tick from before the change, so no window of an older
    -- configuration ends behind it and passes by events that only the newer one routes.
    select m.config, m.system_identifier into generations, home from outbox.meta m;
    if home is distinct from (select c.system_identifier from pg_control_system() c) then
        raise exception 'the log comes from another cluster, as after a restore, a move or pg_upgrade: '
            'stop every relay, then run outbox-relay rebase' using errcode = 'OR002';
    end if;
    wal := pg_current_wal_lsn() - '0/0'::pg_lsn;
    now := clock_timestamp();
    incarnation := outbox.incarnation();
end
$$;

-- Makes the sinks of a configuration known, or gives them other patterns under a new generation, all in one
-- transaction. `wanted` is a JSON array of {"name", "patterns": [...], "start": "beginning" | "now" | null}.
-- The shards of a new sink and their first position, one tick for all, are written with it. Without `start`,
-- the sinks of the first configuration of a database begin at the beginning of the log, later ones at the tick.
-- After a rebase the beginning lies in the old numbering: its rows are read by a window of their own.
--
-- New generations are values of the counter, and the epochs of a new sink begin above 2^32 times the counter: neither is
-- ever given out again, so nothing that a relay still holds or writes of a removed sink of the same name counts.
--
-- With `only_from` no sink is made, and patterns are changed only where the generation is still this one.
drop function outbox.register_sinks(jsonb, bigint, pg_snapshot, bigint);
create function outbox.register_sinks(
    wanted jsonb, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint, only_from bigint default null
) returns table (name text, generation bigint, patterns text[])
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    first boolean;
    sink record;
    beginning boolean;
    rebased outbox.meta;
    counter bigint;
begin
    lock table outbox.sink in share row exclusive mode;
    first := not exists (select from outbox.sink);
    for sink in
        select w.name, array(select jsonb_array_elements_text(w.patterns)) as patterns, w.start
          from jsonb_to_recordset(wanted) w (name text, patterns jsonb, start text)
    loop
        if exists (select from outbox.sink s
                    where s.name = sink.name and s.patterns <> sink.patterns
                      and s.generation = coalesce(only_from, s.generation)) then
            counter := outbox.raise_config();
            update outbox.sink s set patterns = sink.patterns, generation = counter where s.name = sink.name;
        elsif only_from is null and not exists (select from outbox.sink s where s.name = sink.name) then
            beginning := coalesce(sink.start = 'beginning', first);
            -- What was written of a removed sink of this name after its removal.
            delete from outbox.delivery d where d.sink = sink.name;
            delete from outbox.progress p where p.sink = sink.name;
            counter := outbox.raise_config();
            select * into rebased from outbox.meta m;
            insert into outbox.sink (name, patterns, generation, start)
            values (sink.name, sink.patterns, counter, case when beginning then 'beginning' else 'now' end);
            insert into outbox.shard (sink, shard, epoch)
            select sink.name, n, counter << 32 from generate_series(0, 63) n;
            insert into outbox.progress (
                sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id
            )
            select sink.name, array(select generate_series(0, 63)), array_fill(counter << 32, array[64]),
                   case when beginning then 0 else tick_seq end,
                   case when beginning then '3:3:'::pg_snapshot else tick_snapshot end,
                   case when beginning then 3 else tick_next end,
                   case when beginning and rebased.floor > 0 then rebased.floor end,
                   case when beginning and rebased.floor > 0
                        then '9223372036854775807:9223372036854775807:'::pg_snapshot end,
                   case when beginning and rebased.floor > 0 then rebased.floor_xid end,
                   0;
        end if;
    end loop;
    return query
        select s.name, s.generation, s.patterns from outbox.sink s
         where s.name in (select w.name from jsonb_to_recordset(wanted) w (name text));
end
$$;

-- Removes a sink with its rows, positions and shards, and returns how many rows of `delivery` it had. Relays that serve it
-- lose its shards, and what they still write of it counts for nothing, also when a sink of this name is made again.
-- Deleting the shards comes first: it waits for settlements that have passed their fence, and no other passes it then.
create function outbox.remove_sink(sink_name text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    removed_rows bigint;
begin
    lock table outbox.sink in share row exclusive mode;
    if not exists (select from outbox.sink s where s.name = sink_name) then
        raise exception using errcode = 'no_data_found',
            message = format('there is no sink %s', coalesce(quote_literal(sink_name), 'without a name')),
            hint = (select coalesce('There are: ' || string_agg(s.name, ', ' order by s.name), 'There is none.')
                      from outbox.sink s);
    end if;
    delete from outbox.shard s where s.sink = sink_name;
    delete from outbox.delivery d where d.sink = sink_name;
    get diagnostics removed_rows = row_count;
    delete from outbox.sink s where s.name = sink_name;
    return removed_rows;
end
$$;

-- What a sink has not settled of the log, as pieces for the two reading functions: ids in (after_id, upto_id], read
-- from tick A to the snapshot in which everything is visible, since a query sees only what is committed anyway.
-- Shards that stand at the same newest position share their pieces. Of a position (A, B, last) these are left:
-- the latecomers of A and the rest, both behind `last`; and up to `last` what is visible now and not in B, which
-- is the latecomers of B and, above B's sequence value, what was committed since.
-- The last window of an old numbering (see outbox.rebase) is left as it is read; above its end nothing is done.
-- Of a shard without a position the whole log is left.
create or replace function outbox.unsettled(sink_name text) returns table (
    late boolean, shards smallint[], a pg_snapshot, a_next bigint, after_id bigint, upto_id bigint
)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with position as (
        select array_agg(p.shard order by p.shard) as shards,
               p.a_seq, p.a_snapshot::text::pg_snapshot as a, p.a_next,
               p.b_seq, p.b_snapshot::text::pg_snapshot as b, p.b_next, p.last_id,
               coalesce(p.b_snapshot::text = '9223372036854775807:9223372036854775807:', false) as old,
               (select m.floor from outbox.meta m) as floor
          from outbox.standing p
         where p.sink = sink_name
         group by p.a_seq, p.a_snapshot::text, p.a_next, p.b_seq, p.b_snapshot::text, p.b_next, p.last_id
    ),
    missing as (
        select array_agg(n.shard::smallint order by n.shard) as shards
          from outbox.sink k
         cross join generate_series(0, 63) n (shard)
         where k.name = sink_name and n.shard <> all (array(select unnest(p.shards) from position p))
    )
    select k.late, p.shards, k.a, k.a_next, k.after_id, k.upto_id
      from position p
     cross join lateral (values
        (true, p.a, p.a_next, greatest(p.last_id, case when p.old then 0 else p.floor end), p.a_seq),
        (false, p.a, null, greatest(p.last_id, p.a_seq), case when p.old then p.b_seq else 9223372036854775807 end),
        (true, p.b, p.b_next, p.floor, case when not p.old then least(p.last_id, p.b_seq) end),
        (false, p.b, null, p.b_seq, case when not p.old then p.last_id end),
        (false, case when p.old then (p.b_next || ':' || p.b_next || ':')::pg_snapshot end, null, p.b_seq,
         case when p.old then 9223372036854775807 end)
     ) k (late, a, a_next, after_id, upto_id)
     where k.after_id < k.upto_id
    union all
    select false, m.shards, '3:3:'::pg_snapshot, null, 0, 9223372036854775807
      from missing m
     where m.shards is not null
$$;

-- Gives new ids, above `highest`, to events that took theirs from a sequence that was behind the log, and returns how many
-- there were. Ids up to `highest` may be those of other events, and below the positions of sinks they would be passed by.
--
-- An event that this cluster's transactions wrote has as `xmin` the transaction of `xid` or a savepoint of it; one that was
-- copied here has that of the copy. So those that are meant begin at their `xid`, modulo 2^32. Others that look the same
-- come twice, which is allowed.
create function outbox.renumber(upto_id bigint, highest bigint) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    renumbered bigint;
begin
    update outbox.event e
       set id = highest + n.place
      from (
        select l.tableoid as part, l.ctid as row_id, row_number() over (order by l.id, l.created_at) as place
          from outbox.event l
         where l.id <= upto_id
           and ((l.xmin::text::bigint - (l.xid::text::bigint & 4294967295)) & 4294967295) < 2147483648
      ) n
     where e.tableoid = n.part and e.ctid = n.row_id;
    get diagnostics renumbered = row_count;
    return renumbered;
end
$$;

-- Up to where each shard of a sink has settled the log without a gap: what is not done of it has higher ids. Shards
-- without a position have settled nothing.
create function outbox.settled_upto(sink_name text) returns table (shards smallint[], upto_id bigint)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select u.shards, min(case when u.late then l.first_id - 1 else u.after_id end)
      from outbox.unsettled(sink_name) u
      left join lateral (
        select min(e.id) as first_id
          from outbox.event e
         where u.late and e.id > u.after_id and e.id <= u.upto_id and e.shard = any (u.shards)
           and (e.xid = any (array(select pg_snapshot_xip(u.a)))
                or (e.xid >= pg_snapshot_xmax(u.a) and e.xid < u.a_next::text::xid8))
      ) l on true
     group by u.shards
$$;

-- After a restore, or a move to another cluster, the transaction numbers that are stored mean nothing to the
-- server, and ids may be given out twice. This makes them harmless; run it while no relay runs. Returns the floor:
-- the largest id or sequence value that is known; the sequence goes on above it.
--
-- Every shard gets a last window of the old numbering: from the lowest id that it has not settled, with a tick A in which
-- nothing is visible, to a tick in which everything is visible. So what was emitted between the restore and now is read,
-- whatever its transaction number means in the old numbering, and so is what an earlier window of this kind has left.
-- `b_next` is the oldest transaction that runs now: behind that window the shard stands at a tick of the floor
-- and of the snapshot that ends there, with nobody pending, because nobody who emits runs beside this lock.
--
-- Shards without a position get one, at the beginning: nothing is known of what they have settled.
create or replace function outbox.rebase() returns bigint
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
    given_out := (select case when s.is_called then s.last_value else 0 end from outbox.event_id_seq s);
    highest := greatest(
        given_out,
        (select max(e.id) from outbox.event e),
        (select max(d.id) from outbox.delivery d),
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
    update outbox.meta set floor = new_floor, floor_xid = oldest, system_identifier = here;
    return new_floor;
end
$$;

-- A log that was restored into this cluster before it was migrated, as far as that shows: to be rebased first.
update outbox.meta m
   set system_identifier = 0
 where exists (
    select from (select e.xid from outbox.event e where e.id > m.floor order by e.id desc limit 1000) n
     where n.xid >= pg_snapshot_xmax(pg_current_snapshot())
 );

-- ---------------------------------------------------------------------------------------------------------
-- Partitions
-- ---------------------------------------------------------------------------------------------------------
