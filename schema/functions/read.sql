-- A tick: what a window begins or ends at. It is a transaction of its own, refused (25006) by a standby, and (OR002) where the
-- transaction numbers of the log are another cluster's. A cluster can become another one only with the incarnation of the
-- server. So that is looked into unless it is the `known` one, that of the caller's last tick: the answer may come from a file.
create or replace function outbox_internal.tick(
    known text default null,
    out seq bigint, out snapshot pg_snapshot, out next_xid bigint, out incarnation text,
    out now timestamptz, out generations bigint
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    xmax bigint;
begin
    if pg_current_xact_id_if_assigned() is not null then
        raise exception 'outbox_internal.tick must be a transaction of its own';
    end if;
    if pg_is_in_recovery() then
        raise exception 'the server is a standby' using errcode = 'read_only_sql_transaction';
    end if;
    -- Not `last_value` of the relation: nextval() stores a value 32 ahead there while it writes its WAL record, and a
    -- query can see it. Ids up to a tick's sequence value that are given out after the tick would never be read.
    seq := pg_sequence_last_value('outbox.event_id_seq');
    if seq is null then
        -- The function also returns null without the privilege (PostgreSQL 18), which this statement refuses.
        perform from outbox.event_id_seq;
        seq := 0;
    end if;
    snapshot := pg_current_snapshot();
    xmax := pg_snapshot_xmax(snapshot)::text::bigint;
    next_xid := xmax + (((3 + age('3'::xid)::bigint) - xmax) & 4294967295);
    -- After the snapshot: who sees the old value has a tick from before the change, so no window of an older
    -- configuration ends behind it and passes by events that only the newer one routes.
    generations := (select m.config from outbox.meta m);
    now := clock_timestamp();
    incarnation := outbox_internal.incarnation();
    if incarnation is distinct from known then
        perform outbox_internal.at_home();
        if not has_sequence_privilege('outbox.server_mark', 'select') then
            -- The mark is missing from the incarnation (PostgreSQL 18), so that a crash of the server would not show.
            perform from outbox.server_mark;
        end if;
    end if;
end
$$;

-- A tick, and the window that ends at it if it has at most `most_ids` ids. Without a tick A (null) the tick comes alone. The
-- rest of a window is read as far as its events are small if `most_size` is not null.
create or replace function outbox_internal.look_small(
    a_seq bigint, a pg_snapshot, a_next bigint, floor_id bigint, shards smallint[], types text[],
    most_ids bigint, most_rows integer, most_bytes bigint, most_payload bigint, most_size integer, known text
) returns table (
    seq bigint, snapshot text, next_xid bigint, incarnation text, now timestamptz, generations bigint,
    read boolean,
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text, tenant text, bytes_before bigint
)
language plpgsql volatile rows 100
set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms'
set jit = off
as $$
#variable_conflict use_column
declare
    t record;
    b pg_snapshot;
    above bigint;
    below bigint;
    finished boolean := false;
    rows_limit constant integer := greatest(most_rows, 1);
    bytes_limit constant bigint := greatest(most_bytes, 1);
    found_late bigint;
begin
    t := outbox_internal.tick(known);
    b := t.snapshot;
    if a is not null then
        above := pg_snapshot_xmax(a)::text::bigint;
        below := least(a_next, pg_snapshot_xmax(b)::text::bigint);
        finished := below > above and below - above > (
            select count(*) from pg_snapshot_xip(b) x where x::text::bigint >= above and x::text::bigint < below
        ) or exists (select from pg_snapshot_xip(a) x where pg_visible_in_snapshot(x, b));
    end if;
    read := coalesce((finished or t.seq <> a_seq) and t.seq::numeric - a_seq <= most_ids, false);
    -- The tick is the first row. Assignments cost less than a query.
    seq := t.seq;
    snapshot := b::text;
    next_xid := t.next_xid;
    incarnation := t.incarnation;
    now := t.now;
    generations := t.generations;
    return next;
    if not read then
        return;
    end if;
    if finished and floor_id < a_seq then
        return query
        select null::bigint, null::text, null::bigint, null::text, null::timestamptz, null::bigint, true,
               l.*
          from outbox_internal.read_late(
            shards, types, a, a_next, b, floor_id, a_seq, rows_limit, bytes_limit, most_payload
          ) l;
        get diagnostics found_late = row_count;
        if found_late >= rows_limit then
            return;
        end if;
    end if;
    return query
    select null::bigint, null::text, null::bigint, null::text, null::timestamptz, null::bigint, true, r.*
      from outbox_internal.read_rest(
        shards, types, a, b, a_seq, 9223372036854775807, rows_limit, bytes_limit, most_payload, most_size
      ) r;
end
$$;

-- An event of the log as a relay reads it: without values that no client can load and without a payload or key that is too large,
-- whose fault says so. All reading functions return what this one does.
--
-- Reads of small events give `most_size`. Then an event with a larger payload, with headers of twice as much, or with a fault has
-- the fault `unread`: it and those behind it are to be read by outbox_internal.read_rest.
--
-- A query, which takes the place of its call when a statement is planned. It is called on the events that a subquery with a
-- limit has chosen, so that only what is returned is looked at, and no partition's plan does it.
create or replace function outbox_internal.readable(e outbox.event, ceiling bigint, most_size integer) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text, tenant text
)
language sql stable
begin atomic
    select e.id, e.shard, e.uid::text, e.type,
           case when octet_length(e.key) <= 1024 then e.key end,
           case when octet_length(e.payload) <= ceiling then e.payload end,
           coalesce(e.content_type, 'application/json'),
           case when pg_column_size(e.headers) <= coalesce(2 * most_size, 262144) then e.headers::text end,
           case when e.deliver_at >= '0001-01-01 00:00:00+00' and e.deliver_at < '9999-01-01 00:00:00+00' then e.deliver_at end,
           least(greatest(e.created_at, '0001-01-01 00:00:00+00'), '9998-12-31 00:00:00+00'),
           case when most_size is null
                then outbox_internal.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling)
                when pg_column_size(e.headers) > 2 * most_size
                     or outbox_internal.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) is not null
                then 'unread' end,
           case when octet_length(e.tenant) <= 255 then e.tenant end;
end;

-- The bytes of an event that a read returns.
create or replace function outbox_internal.bytes_of(payload bytea, key text, headers text) returns integer
language sql immutable
return coalesce(octet_length(payload), 0) + coalesce(octet_length(key), 0) + coalesce(octet_length(headers), 0);

-- The next events of the window from tick A to tick B with ids in a range, in id order. A query, which takes the place of its
-- call when a statement is planned.
create or replace function outbox_internal.window_events(
    shards smallint[], types text[], notices boolean, a pg_snapshot, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer
) returns setof outbox.event
language sql stable
begin atomic
    select l.*
      from outbox.event l
     where l.id > after_id and l.id <= upto_id and l.shard = any (shards)
       and outbox_internal.is_routed(l.type, l.content_type, l.payload, types, notices)
       and pg_visible_in_snapshot(l.xid, b) and not pg_visible_in_snapshot(l.xid, a)
     order by l.id
     limit greatest(most_rows, 0);
end;

-- The window from tick A to tick B, second part: ids above A's sequence value in id order, visible in B and not in A. Below that
-- value it finds the latecomers, id by id: for those that lie close together. Erased events are left out, and so are reserved
-- types unless they are asked for. The read ends with the event that reaches `most_bytes`.
--
-- With `most_size`, it finds the next events if they are small: none of them with more than this many bytes of payload, or twice
-- as many of headers. So their bytes are bounded without a running sum, which takes a third of the time. An event that is larger,
-- or that has a fault, comes with the fault `unread`.
--
-- Reads are not bounded by `created_at`, which would spare them most partitions: a clock may step back by more than any bound
-- and forth again between two ticks, while no relay runs, and nothing would tell which events were emitted meanwhile.
create or replace function outbox_internal.read_rest(
    shards smallint[], types text[], a pg_snapshot, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint, most_payload bigint default null, most_size integer default null
) returns setof outbox_internal.read_event
language plpgsql stable rows 1000
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_sort = off
set enable_incremental_sort = off
set enable_bitmapscan = off
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    ceiling constant bigint := least(most_payload, outbox_internal.payload_ceiling());
    notices constant boolean := coalesce('outbox.%' = any (types), false);
begin
    if most_size is not null then
        return query
        select r.*, null::bigint
          from outbox_internal.window_events(shards, types, notices, a, b, after_id, upto_id, most_rows) e
         cross join lateral outbox_internal.readable(e, least(ceiling, most_size), most_size) r
         order by r.id;
        return;
    end if;
    return query
    select w.*
      from (
        select f.*, sum(outbox_internal.bytes_of(f.payload, f.key, f.headers))
                    over (order by f.id rows between unbounded preceding and 1 preceding) as bytes_before
          from (
            select r.*
              from outbox_internal.window_events(shards, types, notices, a, b, after_id, upto_id, most_rows) e
             cross join lateral outbox_internal.readable(e, ceiling, null) r
             order by r.id offset 0
          ) f
      ) w
     where w.bytes_before < most_bytes or w.bytes_before is null;
end
$$;

-- The window from tick A to tick B, first part: the latecomers, ids up to A's sequence value whose transactions were
-- running at A and are visible in B. Transactions that still run at B are left out before the log is looked at, however
-- many events they have by then.
--
-- Given `most_payload`, one call looks at about 5 * `most_rows` events at most, whatever the size of a transaction, and
-- at eight times as many while none is of the given types: a sink that gets nothing of a large transaction soon is behind
-- it. What it leaves is said by a last row with shard -1, whose id is the one up to which all was looked at; without it
-- all was, unless `most_rows` or `most_bytes` ended the read. Such a row is no event.
--
-- Transactions in [xmax, a_next) of A are listed when there are few; else those that have events are found one after
-- another by the index: most numbers of a long range are savepoints. Events that lie close together are read in id
-- order, others by transaction.
--
-- Erased events are left out, and so are reserved types unless they are asked for.
create or replace function outbox_internal.read_late(
    shards smallint[], types text[], a pg_snapshot, a_next bigint, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint, most_payload bigint default null
) returns setof outbox_internal.read_event
language plpgsql stable rows 100
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set max_parallel_workers_per_gather = 0
set jit = off
as $$
#variable_conflict use_column
declare
    no_limit constant bigint := 9223372036854775807;
    few constant integer := 32;
    close_together constant integer := 25;
    ceiling bigint;
    notices constant boolean := coalesce('outbox.%' = any (types), false);
    above constant bigint := pg_snapshot_xmax(a)::text::bigint;
    b_xmax constant bigint := pg_snapshot_xmax(b)::text::bigint;
    below constant bigint := least(a_next, b_xmax);
    most_looks constant bigint := 5 * most_rows::bigint;
    late xid8[] := array(select x from pg_snapshot_xip(a) x where pg_visible_in_snapshot(x, b));
    still bigint[];
    each bigint;
    looks bigint;
    last_id bigint := upto_id;
    from_id bigint := after_id;
    steps constant integer := 8;
    wanted boolean := true;
begin
    if below - above between 1 and few then
        late := late || array(
            select x::text::xid8 from generate_series(above, below - 1) x where pg_visible_in_snapshot(x::text::xid8, b)
        );
    elsif below > above then
        still := array(
            select x::text::bigint from pg_snapshot_xip(b) x where x::text::bigint between above and below - 1 order by 1
        );
        late := late || array(
            select f.xid from unnest(above - 1 || still, still || below) g (low, high)
             cross join lateral (
                with recursive found (xid) as (
                    select (select l.xid from outbox.event l
                             where l.xid > g.low::text::xid8 and l.xid < g.high::text::xid8 order by l.xid limit 1)
                    union all
                    select (select l.xid from outbox.event l
                             where l.xid > f.xid and l.xid < g.high::text::xid8 order by l.xid limit 1)
                      from found f where f.xid is not null
                )
                select f.xid from found f where f.xid is not null
             ) f
        );
    end if;
    if cardinality(late) = 0 then
        return;
    end if;
    ceiling := least(most_payload, outbox_internal.payload_ceiling());
    if most_payload is not null then
        select count(*), min(r.id) - 1, max(r.id) into looks, after_id, last_id
          from (
            select l.id from outbox.event l
             where l.xid = any (late) and l.id + 0 > after_id and l.id + 0 <= upto_id
             limit most_looks + 1
          ) r;
        if looks = 0 then
            return;
        end if;
        if looks > most_looks then
            -- The next ids of each transaction, up to where those of one end first: there are no others before.
            each := greatest(most_looks / cardinality(late), 1);
            for step in 1..steps loop
                select min(f.first_id) - 1, coalesce(min(f.last_id), upto_id), coalesce(bool_or(f.wanted), false)
                  into after_id, last_id, wanted
                  from unnest(late) x (xid)
                 cross join lateral (
                    select min(i.id) as first_id, case when count(*) = each then max(i.id) end as last_id,
                           bool_or(types is null or i.type like any (types)) as wanted
                      from (
                        select l.id, l.type from outbox.event l
                         where l.xid = x.xid and l.id + 0 > from_id and l.id + 0 <= upto_id
                         order by l.id + 0
                         limit each
                      ) i
                 ) f;
                exit when wanted or last_id >= upto_id;
                from_id := last_id;
            end loop;
        end if;
    end if;
    if not wanted then
        null;  -- only how far it got
    elsif looks is not null and b_xmax < no_limit and last_id - after_id <= close_together * least(looks, most_looks) then
        return query
        select * from outbox_internal.read_rest(shards, types, a, b, after_id, last_id, most_rows, most_bytes, most_payload);
    else
    return query
    select w.*
      from (
        select f.*, sum(outbox_internal.bytes_of(f.payload, f.key, f.headers))
                    over (order by f.id rows between unbounded preceding and 1 preceding) as bytes_before
          from (
            select r.*
              from (
                select l.*
                  from outbox.event l
                 where l.xid = any (late) and l.id + 0 > after_id and l.id + 0 <= last_id
                   and (l.shard + 0) = any (shards)
                   and outbox_internal.is_routed(l.type, l.content_type, l.payload, types, notices)
                 order by l.id + 0
                 limit most_rows
              ) e
             cross join lateral outbox_internal.readable(e, ceiling, null) r
             order by r.id offset 0
          ) f
      ) w
     where w.bytes_before < most_bytes or w.bytes_before is null
     order by w.id;
    end if;
    if looks > most_looks and last_id < upto_id then
        return query
        select last_id, -1::smallint, ''::text, ''::text, null::text, null::bytea, ''::text, null::text,
               null::timestamptz, '2000-01-01 00:00:00+00'::timestamptz, null::text, null::text, null::bigint;
    end if;
end
$$;

-- True on the server with this incarnation, an error (OR001) on any other. For statements that speak of ticks, or of
-- what was decided from what a server said: another one may have given out the same ids and transaction numbers for
-- other events, and a pooler may have sent the statement there without a word. Nothing is asked for null.
create or replace function outbox_internal.only_at(server text) returns boolean
language plpgsql stable
as $$
begin
    if server <> outbox_internal.incarnation() then
        raise exception 'the server is another incarnation' using errcode = 'OR001';
    end if;
    return true;
end
$$;

-- Marks the server if it has no mark, as before the first call after a crash. Setting the value takes no transaction number and
-- writes no WAL. The row that is locked meanwhile is one that only the relays and the schema's owner may lock, so that no
-- other role can keep a relay waiting here. A log whose cluster is not known gets this one.
create or replace function outbox_internal.arm() returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_is_in_recovery() then
        raise exception 'the server is a standby' using errcode = 'read_only_sql_transaction';
    end if;
    if pg_sequence_last_value('outbox.server_mark') is null then
        perform from outbox.meta for update;
        if pg_sequence_last_value('outbox.server_mark') is null then
            perform setval('outbox.server_mark',
                           1 + ('x' || left(translate(gen_random_uuid()::text, '-', ''), 12))::bit(48)::bigint);
        end if;
    end if;
    if (select m.system_identifier is null from outbox.meta m) and outbox_internal.home() is not null then
        update outbox.meta m set system_identifier = outbox_internal.home() where m.system_identifier is null;
    end if;
end
$$;

-- The unsettled part of the log of a sink, as pieces for the two reading functions: ids in (after_id, upto_id], read
-- from tick A to the snapshot in which everything is visible, since a query sees only what is committed anyway.
-- Shards that stand at the same newest position share their pieces. Of a position (A, B, last) these are left:
-- the latecomers of A and the rest, both behind `last`; and up to `last` what is visible now and not in B, which
-- is the latecomers of B and, above B's sequence value, what was committed since.
-- The last window of an old numbering (see outbox.rebase) is left as it is read; above its end nothing is done.
-- Of a shard without a position the whole log is left.
create or replace function outbox_internal.unsettled(sink_name text) returns table (
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

-- Up to where each shard of a sink has settled the log without a gap: what is not done of it has higher ids. Shards
-- without a position have settled nothing.
create or replace function outbox_internal.settled_upto(sink_name text) returns table (shards smallint[], upto_id bigint)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select u.shards, min(case when u.late then l.first_id - 1 else u.after_id end)
      from outbox_internal.unsettled(sink_name) u
      left join lateral (
        select min(e.id) as first_id
          from outbox.event e
         where u.late and e.id > u.after_id and e.id <= u.upto_id and e.shard = any (u.shards)
           and (e.xid = any (array(select pg_snapshot_xip(u.a)))
                or (e.xid >= pg_snapshot_xmax(u.a) and e.xid < u.a_next::text::xid8))
      ) l on true
     group by u.shards
$$;
