-- A tick and the reading of a small window in one round trip. Relays made for version 2 work on this schema.

-- Takes a tick, B, and reads the window from A to B if that is small. The first row is the tick. `read` says whether the
-- window was read; its events follow, first the latecomers, then the rest, each as `outbox.read_late` and
-- `outbox.read_rest` return them. It is not read if `a` is null, if more than `most_ids` ids were taken since, or if it is
-- certainly empty: no id was taken since A, and no transaction that may have been running at A has finished.
--
-- Volatile, so that each statement has a snapshot of its own: those that read have one that is later than B. Like
-- `outbox.tick`, it must be a transaction of its own.
--
-- A lock on a partition must not hold up the ticks, so it fails soon. The relay then takes a tick alone.
create function outbox.look(
    a_seq bigint, a pg_snapshot, a_next bigint, floor_id bigint, shards smallint[], types text[],
    most_ids bigint, most_rows integer, most_bytes bigint, most_payload bigint
) returns table (
    seq bigint, snapshot text, next_xid bigint, incarnation text, wal bigint, now timestamptz, generations bigint,
    read boolean,
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
)
language plpgsql volatile rows 100
set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms'
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
    return query
    select null::bigint, null::text, null::bigint, null::text, null::bigint, null::timestamptz, null::bigint, true, r.*
      from outbox.read_rest(
        shards, types, a, b, a_seq, 9223372036854775807, rows_limit, bytes_limit, most_payload
      ) r;
end
$$;
