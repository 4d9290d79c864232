-- Marks of discarded events end with their events, archives have every column, and small events are read faster. Relays of
-- earlier versions work on this schema.

-- Remove marks of discarded events whose ids are below those of the log, looking at the first `most` (1,000; at most 10,000)
-- of each sink, and return how many were removed. Cancelled events have such marks too, so there may be as many as events.
-- A mark stays for a week, since a dead letter may have been discarded long after its event had left the log, and
-- outbox.why says by whom.
create function outbox.trim_discarded(most integer) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    lowest constant bigint := (select min(e.id) from outbox.event e);
    removed bigint;
begin
    delete from outbox.discarded m
     where m.ctid = any (array(
            select o.ctid
              from outbox.sink k
             cross join lateral (
                select d.ctid, d.at from outbox.discarded d
                 where d.sink = k.name and d.id < lowest
                 order by d.id
                 limit least(greatest(coalesce(most, 1000), 1), 10000)
             ) o
             where o.at < clock_timestamp() - interval '7 days'));
    get diagnostics removed = row_count;
    return removed;
end
$$;

-- As outbox.read_day in version 6, with the columns that came in version 21.
create function outbox.read_day_events(
    day date, lease bigint, after_id bigint, after_uid uuid, most_rows integer, most_bytes bigint
) returns table (
    id bigint, xid text, shard smallint, uid text, type text, key text, content_type text, headers text,
    deliver_at text, created_at text, emitter text, tenant text, priority smallint, payload bytea, key_hash text
)
language plpgsql stable security definer rows 1000
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_variable
declare
    c constant outbox.day := outbox.checked_day(day, lease);
    part constant regclass := outbox.part_of(day);
begin
    most_rows := least(greatest(coalesce(most_rows, 1000), 1), 10000);
    most_bytes := least(greatest(coalesce(most_bytes, 8388608), 1), 268435456);
    return query execute format(
        'select w.id, w.xid::text, w.shard, w.uid::text, w.type, w.key, w.content_type, w.headers::text, '
        '       w.deliver_at::text, w.created_at::text, w.emitter, w.tenant, w.priority, w.payload, '
        '       outbox.keyed_hash(w.key) '
        '  from (select f.*, sum(coalesce(octet_length(f.payload), 0)) '
        '                    over (order by f.id, f.uid rows between unbounded preceding and 1 preceding) as bytes '
        '          from (select e.* from %s e '
        '                 where e.id >= $1 and (e.id, e.uid) > ($1, $2) and e.created_at < $6 '
        '                   and (e.id <= $7 or pg_visible_in_snapshot(e.xid, $5)) '
        '                 order by e.id, e.uid limit $3) f) w '
        ' where w.bytes is null or w.bytes < $4 order by w.id, w.uid', part)
        using coalesce(after_id, -9223372036854775808),
              coalesce(after_uid, '00000000-0000-0000-0000-000000000000'), most_rows, most_bytes, c.checked_snapshot, c.checked_before,
              (select m.floor from outbox.meta m);
end
$$;

-- For relays of earlier versions, whose archives have neither tenant nor priority.
create or replace function outbox.read_day(
    day date, lease bigint, after_id bigint, after_uid uuid, most_rows integer, most_bytes bigint
) returns table (
    id bigint, xid text, shard smallint, uid text, type text, key text, content_type text, headers text,
    deliver_at text, created_at text, emitter text, payload bytea, key_hash text
)
language sql stable security definer rows 1000
set search_path = pg_catalog, pg_temp
set jit = off
as $$
    select r.id, r.xid, r.shard, r.uid, r.type, r.key, r.content_type, r.headers, r.deliver_at, r.created_at, r.emitter,
           r.payload, r.key_hash
      from outbox.read_day_events($1, $2, $3, $4, $5, $6) r
     order by r.id, r.uid::uuid
$$;

-- The next events of a window, as outbox.read_rest finds them, if they are small: at most `most_rows`, none of them with
-- more than `most_size` bytes of payload, key and headers. So their bytes are bounded without a running sum, which takes a
-- third of the time of outbox.read_rest. An event that is larger, or that has a fault, comes without its contents and with
-- the fault 'unread': it and those behind it are to be read by outbox.read_rest.
create function outbox.read_small(
    shards smallint[], types text[], a pg_snapshot, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_size integer, most_payload bigint
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
)
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
    ceiling constant bigint := least(most_payload, outbox.payload_ceiling());
    notices constant boolean := coalesce('outbox.%' = any (types), false);
begin
    return query
    select w.id, w.shard, w.uid::text, w.type, case when w.small then w.key end,
           case when w.small then w.payload end, w.content_type, case when w.small then w.headers end,
           case when w.small then w.deliver_at end,
           case when w.small then w.created_at else '1970-01-01 00:00:00+00' end,
           case when not w.small then 'unread' end
      from (
        select f.*, coalesce(f.intact and f.bytes + coalesce(octet_length(f.headers), 0) <= most_size, false) as small
          from (
            -- A level of its own (offset 0), so that only what is returned is looked at, and no partition's plan does it.
            select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.deliver_at, e.created_at,
                   case when pg_column_size(e.headers) <= 262144 then e.headers::text end as headers,
                   coalesce(octet_length(e.payload), 0) + coalesce(octet_length(e.key), 0) as bytes,
                   e.created_at >= '0001-01-01 00:00:00+00' and e.created_at < '9999-01-01 00:00:00+00'
                   and outbox.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) is null as intact
              from (
                select l.id, l.shard, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at,
                       l.created_at
                  from outbox.event l
                 where l.id > after_id and l.id <= upto_id and l.shard = any (shards)
                   and (types is null or l.type like any (types)) and (notices or l.type not like 'outbox.%')
                   and not outbox.is_erased(l.content_type, l.payload)
                   and pg_visible_in_snapshot(l.xid, b) and not pg_visible_in_snapshot(l.xid, a)
                 order by l.id
                 limit greatest(most_rows, 0)
              ) e
            order by e.id offset 0
          ) f
        offset 0
      ) w;
end
$$;

-- As outbox.look in version 17, which relays of earlier versions call. The rest of a window is read by outbox.read_small if
-- `most_size` is not null.
create function outbox.look_small(
    a_seq bigint, a pg_snapshot, a_next bigint, floor_id bigint, shards smallint[], types text[],
    most_ids bigint, most_rows integer, most_bytes bigint, most_payload bigint, most_size integer
) returns table (
    seq bigint, snapshot text, next_xid bigint, incarnation text, wal bigint, now timestamptz, generations bigint,
    read boolean,
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
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
    select * into t from outbox.tick();
    b := t.snapshot;
    if a is not null then
        above := pg_snapshot_xmax(a)::text::bigint;
        below := least(a_next, pg_snapshot_xmax(b)::text::bigint);
        finished := below > above and below - above > (
            select count(*) from pg_snapshot_xip(b) x where x::text::bigint >= above and x::text::bigint < below
        ) or exists (select from pg_snapshot_xip(a) x where pg_visible_in_snapshot(x, b));
    end if;
    read := coalesce((finished or t.seq <> a_seq) and t.seq::numeric - a_seq <= most_ids, false);
    return query
    select t.seq, t.snapshot::text, t.next_xid, t.incarnation, t.wal, t.now, t.generations, read,
           null::bigint, null::smallint, null::text, null::text, null::text, null::bytea, null::text, null::text,
           null::timestamptz, null::timestamptz, null::text;
    if not read then
        return;
    end if;
    if finished and floor_id < a_seq then
        return query
        select null::bigint, null::text, null::bigint, null::text, null::bigint, null::timestamptz, null::bigint, true,
               l.*
          from outbox.read_late(
            shards, types, a, a_next, b, floor_id, a_seq, rows_limit, bytes_limit, most_payload
          ) l;
        get diagnostics found_late = row_count;
        if found_late >= rows_limit then
            return;
        end if;
    end if;
    if most_size is not null then
        return query
        select null::bigint, null::text, null::bigint, null::text, null::bigint, null::timestamptz, null::bigint, true,
               s.*
          from outbox.read_small(
            shards, types, a, b, a_seq, 9223372036854775807, rows_limit, most_size, most_payload
          ) s;
        return;
    end if;
    return query
    select null::bigint, null::text, null::bigint, null::text, null::bigint, null::timestamptz, null::bigint, true, r.*
      from outbox.read_rest(
        shards, types, a, b, a_seq, 9223372036854775807, rows_limit, bytes_limit, most_payload
      ) r;
end
$$;
