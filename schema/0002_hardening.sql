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

-- The functions that read the log have a new last argument, `most_payload`: the largest payload in bytes that the
-- caller can take. Null is what relays of version 1 say: then nothing below applies.
--
-- An event that cannot be delivered comes with a reason in `fault` and without its payload, so that nothing is fetched
-- or loaded that does not fit: it becomes a dead letter, and its neighbours flow. Times are bounded by what clients can
-- load. `most_bytes` then counts payloads, keys and headers.
drop function outbox.read_rest(smallint[], text[], pg_snapshot, pg_snapshot, bigint, bigint, integer, bigint);
drop function outbox.read_late(
    smallint[], text[], pg_snapshot, bigint, pg_snapshot, bigint, bigint, integer, bigint
);

-- An index on both: the events of some transactions can be read in id order, a few at a time. The expression leaves it
-- as the only index that fits where that is asked for: where all events of a day are of few transactions, PostgreSQL
-- would walk through the ids instead.
drop index outbox.event_xid;
create index event_xid_id on outbox.event (xid, (id + 0));

-- Why an event of the log cannot be delivered, or null, given the largest payload that can be; null is for who does not
-- ask. One expression, which takes the place of its call when a statement is planned. The length of a payload or key is
-- known without fetching it; that of headers as text is not.
create function outbox.delivery_fault(
    payload bytea, key text, headers jsonb, deliver_at timestamptz, ceiling bigint
) returns text
language sql stable parallel safe
return case
    when ceiling is null then null
    when deliver_at < '0001-01-02 00:00:00+00' or deliver_at >= '9999-01-01 00:00:00+00' then
        'deliver_at lies outside the years 1 to 9998'
    when payload is null then 'payload is null'
    when octet_length(payload) > ceiling then
        'payload has ' || octet_length(payload)::text || ' bytes, more than the ceiling of ' || ceiling::text
    when octet_length(key) > 1024 then 'key has ' || octet_length(key)::text || ' bytes, more than the limit of 1024'
    when pg_column_size(headers) > 262144 then
        'headers have ' || pg_column_size(headers)::text || ' bytes, more than the limit of 262144'
end;

-- The window from tick A to tick B, second part, as in version 1: ids above A's sequence value in id order, visible in B
-- and not in A. Below that value it finds the latecomers, id by id: for those that lie close together.
create function outbox.read_rest(
    shards smallint[], types text[], a pg_snapshot, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint, most_payload bigint default null
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
as $$
#variable_conflict use_column
declare
    ceiling constant bigint := case when most_payload is not null then least(most_payload, outbox.payload_ceiling()) end;
begin
    return query
    select w.id, w.shard, w.uid::text, w.type,
           case when w.fault is null or octet_length(w.key) <= 1024 then w.key end,
           case when w.fault is null then w.payload end, w.content_type, w.headers,
           case when w.fault is null
                  or (w.deliver_at >= '0001-01-02 00:00:00+00' and w.deliver_at < '9999-01-01 00:00:00+00')
                then w.deliver_at end,
           case when ceiling is null
                  or (w.created_at >= '0001-01-02 00:00:00+00' and w.created_at < '9999-01-01 00:00:00+00')
                then w.created_at
                else least(greatest(w.created_at, '0001-01-02 00:00:00+00'), '9998-12-31 00:00:00+00') end,
           w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when ceiling is null then 0
                               else coalesce(octet_length(f.key), 0) + coalesce(octet_length(f.headers), 0) end)
                    over (order by f.id rows between unbounded preceding and 1 preceding) as before
          from (
            -- A level of its own (offset 0), so that only what is returned is looked at, and no partition's plan does it.
            select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.deliver_at, e.created_at,
                   case when e.headers is null then null
                        when ceiling is null or pg_column_size(e.headers) <= 262144 then e.headers::text end as headers,
                   outbox.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) as fault
              from (
                select l.id, l.shard, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at,
                       l.created_at
                  from outbox.event l
                 where l.id > after_id and l.id <= upto_id and l.shard = any (shards)
                   and (types is null or l.type like any (types))
                   and pg_visible_in_snapshot(l.xid, b) and not pg_visible_in_snapshot(l.xid, a)
                 order by l.id
                 limit most_rows
              ) e
            order by e.id offset 0
          ) f
      ) w
     where w.before < most_bytes or w.before is null;
end
$$;

-- The window from tick A to tick B, first part: the latecomers, ids up to A's sequence value whose transactions were
-- running at A and are visible in B. Transactions that still run at B are left out before the log is looked at, however
-- many events they have by then.
--
-- Given `most_payload`, one call looks at about 5 * `most_rows` events at most, whatever the size of a transaction. What
-- it leaves is said by a last row with shard -1, whose id is the one up to which all was looked at; without it all was,
-- unless `most_rows` or `most_bytes` ended the read. Such a row is no event.
--
-- Transactions in [xmax, a_next) of A are listed when there are few; else those that have events are found one after
-- another by the index: most numbers of a long range are savepoints. Events that lie close together are read in id
-- order, others by transaction.
create function outbox.read_late(
    shards smallint[], types text[], a pg_snapshot, a_next bigint, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint, most_payload bigint default null
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
)
language plpgsql stable rows 100
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set max_parallel_workers_per_gather = 0
as $$
#variable_conflict use_column
declare
    no_limit constant bigint := 9223372036854775807;
    few constant integer := 32;
    close_together constant integer := 25;
    ceiling constant bigint := case when most_payload is not null then least(most_payload, outbox.payload_ceiling()) end;
    above constant bigint := pg_snapshot_xmax(a)::text::bigint;
    b_xmax constant bigint := pg_snapshot_xmax(b)::text::bigint;
    below constant bigint := least(a_next, b_xmax);
    most_looks constant bigint := 5 * most_rows::bigint;
    late xid8[] := array(select x from pg_snapshot_xip(a) x where pg_visible_in_snapshot(x, b));
    still bigint[];
    each bigint;
    looks bigint;
    last_id bigint := upto_id;
    from_id constant bigint := after_id;
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
    if ceiling is not null then
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
            select min(f.first_id) - 1, coalesce(min(f.last_id), upto_id) into after_id, last_id
              from unnest(late) x (xid)
             cross join lateral (
                select min(i.id) as first_id, case when count(*) = each then max(i.id) end as last_id
                  from (
                    select l.id from outbox.event l
                     where l.xid = x.xid and l.id + 0 > from_id and l.id + 0 <= upto_id
                     order by l.id + 0
                     limit each
                  ) i
             ) f;
        end if;
    end if;
    if looks is not null and b_xmax < no_limit and last_id - after_id <= close_together * least(looks, most_looks) then
        return query
        select * from outbox.read_rest(shards, types, a, b, after_id, last_id, most_rows, most_bytes, most_payload);
    else
    return query
    select w.id, w.shard, w.uid::text, w.type,
           case when w.fault is null or octet_length(w.key) <= 1024 then w.key end,
           case when w.fault is null then w.payload end, w.content_type, w.headers,
           case when w.fault is null
                  or (w.deliver_at >= '0001-01-02 00:00:00+00' and w.deliver_at < '9999-01-01 00:00:00+00')
                then w.deliver_at end,
           case when ceiling is null
                  or (w.created_at >= '0001-01-02 00:00:00+00' and w.created_at < '9999-01-01 00:00:00+00')
                then w.created_at
                else least(greatest(w.created_at, '0001-01-02 00:00:00+00'), '9998-12-31 00:00:00+00') end,
           w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when ceiling is null then 0
                               else coalesce(octet_length(f.key), 0) + coalesce(octet_length(f.headers), 0) end)
                    over (order by f.id rows between unbounded preceding and 1 preceding) as before
          from (
            -- A level of its own (offset 0), so that only what is returned is looked at, and no partition's plan does it.
            select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.deliver_at, e.created_at,
                   case when e.headers is null then null
                        when ceiling is null or pg_column_size(e.headers) <= 262144 then e.headers::text end as headers,
                   outbox.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) as fault
              from (
                select l.id, l.shard, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at,
                       l.created_at
                  from outbox.event l
                 where l.xid = any (late) and l.id + 0 > after_id and l.id + 0 <= last_id
                   and (l.shard + 0) = any (shards) and (types is null or l.type like any (types))
                 order by l.id + 0
                 limit most_rows
              ) e
            order by e.id offset 0
          ) f
      ) w
     where w.before < most_bytes or w.before is null
     order by w.id;
    end if;
    if looks > most_looks and last_id < upto_id then
        return query
        select last_id, -1::smallint, ''::text, ''::text, null::text, null::bytea, ''::text, null::text,
               null::timestamptz, '2000-01-01 00:00:00+00'::timestamptz, null::text;
    end if;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Settling and claims of rows
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Ticks and servers
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Sinks, positions and rebase
-- ---------------------------------------------------------------------------------------------------------

-- ---------------------------------------------------------------------------------------------------------
-- Partitions
-- ---------------------------------------------------------------------------------------------------------
