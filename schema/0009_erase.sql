-- Erase: the only change that is ever made to an event. Its payload, headers and key go, its content type becomes
-- application/x-erased, and every function that reads the log passes it by. Relays made for version 2 work on this schema.

-- The log is locked before it changes, as in version 2: each try takes less than `deadlock_timeout`. In an upgrade from
-- version 2 it is locked already, since version 3.
do $$
declare
    tries constant integer := 10;
    patience constant integer := (select s.setting::integer from pg_settings s where s.name = 'deadlock_timeout');
    lock_timeout_before constant text := current_setting('lock_timeout');
begin
    for attempt in 1..tries loop
        begin
            perform set_config('lock_timeout', greatest(patience / 2, 1)::text, true);
            lock table outbox.event in access exclusive mode;
            exit;
        exception when lock_not_available or deadlock_detected then
            if attempt = tries then
                raise;
            end if;
        end;
        perform pg_sleep(patience / 10000.0);
    end loop;
    perform set_config('lock_timeout', lock_timeout_before, true);
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Shards
-- ---------------------------------------------------------------------------------------------------------

-- A generated column would move an event without a key to another shard, whose position may not have passed it.
alter table outbox.event alter column shard drop expression;

-- The shard of an event: a hash of its key, or of its uid if it has none. Events keep the shard that they were emitted
-- with. One expression, which takes the place of its call when a statement is planned.
create function outbox.shard_of(key text, uid uuid) returns smallint
language sql immutable parallel safe
return (hashtextextended(coalesce(key collate "C", uid::text collate "C"), 0) & 63)::smallint;

-- Fill in the shard where an INSERT of the log's owner, or of a subscription, leaves it out, and refuse a shard that no
-- relay reads. Emits name theirs, which costs them less.
create function outbox.fill_shard() returns trigger
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if new.shard is not null then
        raise exception using errcode = 'check_violation', message = format('there is no shard %s', new.shard);
    end if;
    new.shard := outbox.shard_of(new.key, new.uid);
    return new;
end
$$;

create trigger fill_shard before insert on outbox.event
for each row when (new.shard is null or new.shard not between 0 and 63) execute function outbox.fill_shard();
alter table outbox.event enable always trigger fill_shard;

-- True if an event was erased. Version 2 took events of this content type, which are like any others: they have a
-- payload. One expression, which takes the place of its call when a statement is planned.
create function outbox.is_erased(content_type text, payload bytea) returns boolean
language sql immutable parallel safe
return content_type = 'application/x-erased' and coalesce(octet_length(payload), 0) = 0;

-- ---------------------------------------------------------------------------------------------------------
-- Statistics
-- ---------------------------------------------------------------------------------------------------------

-- No statistics are kept of what erase removes, nor have there been any of rows of `delivery` and of sinks since version 3:
-- statistics hold values, also those of rows that are gone. ANALYZE replaces them only where it finds a row, so those of a
-- table that was emptied would stay. New partitions have none from the beginning. Keys of `delivery` are in indexes, which
-- would be rebuilt: erase has them analyzed.
select outbox.keep_no_statistics('outbox.event', '{key, payload, headers}'),
       outbox.keep_no_statistics('outbox.attempt', '{error, detail}'),
       outbox.keep_no_statistics('outbox.discarded', '{reason}'),
       outbox.keep_no_statistics('outbox.audit', '{filter, reason}'),
       outbox.keep_no_statistics('outbox.replay', '{key, reason}');

-- The columns that hold what erase removes, of each table and partition.
create function outbox.content_columns() returns table (part oid, attnum smallint, name text)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select a.attrelid, a.attnum, format('%I.%I', c.relname, a.attname)
      from (values ('outbox.event'::regclass, '{key, payload, headers}'::name[]),
                   ('outbox.delivery', '{key, payload, headers, last_error, last_attempt}'),
                   ('outbox.attempt', '{error, detail}'), ('outbox.discarded', '{reason}'),
                   ('outbox.audit', '{filter, reason}'), ('outbox.sink', '{last_error, paused_reason}'),
                   ('outbox.replay', '{key, reason}')) t (root, names)
     cross join lateral (
        select t.root::oid as oid union all select i.inhrelid from pg_inherits i where i.inhparent = t.root) p
      join pg_class c on c.oid = p.oid
      join pg_attribute a on a.attrelid = p.oid and a.attname = any (t.names)
$$;

-- Columns of which the server's statistics hold such values: those that an owner asked to have analyzed, or that
-- another object depended on when the schema was upgraded; and an owner's own indexes and statistics on them. Those of
-- the keys of `delivery` are left out: erase renews them.
create function outbox.content_statistics() returns text[]
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select array_agg(distinct k.name order by k.name)
      from (
        select c.name
          from outbox.content_columns() c
          join pg_class t on t.oid = c.part
          join pg_attribute a on a.attrelid = c.part and a.attnum = c.attnum
          join pg_stats s on s.schemaname = 'outbox' and s.tablename = t.relname and s.attname = a.attname
         where c.name <> 'delivery.key'
        union
        select format('%I', x.relname)
          from outbox.content_columns() c
          join pg_depend d on d.classid = 'pg_class'::regclass and d.refobjid = c.part and d.refobjsubid = c.attnum
          join pg_index i on i.indexrelid = d.objid and i.indexprs is not null
          join pg_class x on x.oid = d.objid
        union
        select format('%I', e.stxname)
          from outbox.content_columns() c
          join pg_depend d on d.classid = 'pg_statistic_ext'::regclass and d.refobjid = c.part and d.refobjsubid = c.attnum
          join pg_statistic_ext e on e.oid = d.objid
      ) k (name)
$$;

-- Renew the statistics of the keys of `delivery`, if there are any. ANALYZE keeps them as they are if there is no row, so
-- it is shown one that is gone before any other session can see it.
create function outbox.renew_key_statistics() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if exists (select from pg_stats s
                where s.schemaname = 'outbox' and s.tablename = 'delivery' and s.attname = 'key') then
        insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at)
        values ('', 0, 0, 'dead', false, 'infinity', '00000000-0000-0000-0000-000000000000', '', '', now());
        execute 'analyze outbox.delivery (key)';
        delete from outbox.delivery d where d.sink = '' and d.id = 0;
    end if;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- emit
-- ---------------------------------------------------------------------------------------------------------

-- As in version 2, and the content type of erased events is refused: no function would read such an event.
create or replace function outbox.event_fault(
    type text, payload bytea, key text, headers jsonb, deliver_at timestamptz, content_type text, most text
) returns text
language sql stable
return 'outbox.emit: ' || coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', '') || case
    when type is null or length(type) not between 1 and 255 then
        format('type must be 1 to 255 visible ASCII characters without space and "*"; this one has %s',
               coalesce(length(type)::text || ' characters', 'no value'))
    when type collate "C" ~ '[^\x21-\x29\x2b-\x7e]' then
        format('type must be 1 to 255 visible ASCII characters without space and "*"; %s',
               outbox.shown(type, '[^\x21-\x29\x2b-\x7e]'))
    when payload is null then
        'payload must not be null'
    when most is not null and (length(most) > 9 or most collate "C" ~ '[^0-9]') then
        'the setting outbox.max_payload_bytes must be a number of bytes, below 1000000000'
    when octet_length(payload) > outbox.payload_ceiling() then
        format('payload must have at most %s bytes (the ceiling: see outbox-relay migrate --max-payload-bytes); '
               'this one has %s', outbox.payload_ceiling(), octet_length(payload))
    when octet_length(payload) > most::integer then
        format('payload must have at most %s bytes (setting outbox.max_payload_bytes); this one has %s',
               most, octet_length(payload))
    when octet_length(key) > 1024 then
        format('key must have at most 1024 bytes; this one has %s', octet_length(key))
    when content_type is null or length(content_type) not between 1 and 255 then
        format('content_type must be 1 to 255 printable ASCII characters; this one has %s',
               coalesce(length(content_type)::text || ' characters', 'no value'))
    when content_type collate "C" ~ '[^\x20-\x7e]' then
        format('content_type must be 1 to 255 printable ASCII characters; %s',
               outbox.shown(content_type, '[^\x20-\x7e]'))
    when lower(content_type) = 'application/x-erased' then
        'content_type application/x-erased stands for erased events, and no other event has it'
    when deliver_at not between '0001-01-01 00:00:00+00' and '9998-12-31 23:59:59.999999+00' then
        format('deliver_at must be in the years 1 to 9998 (UTC); this one is %s', deliver_at)
    when headers is not null then
        outbox.header_fault(headers)
end;

-- As in version 2. The shard is filled in here.
create or replace function outbox.emit_raw(
    type text,
    payload bytea,
    key text default null,
    headers jsonb default null,
    deliver_at timestamptz default null,
    uid uuid default null,
    content_type text default 'application/octet-stream'
) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    fault text;
begin
    if outbox.is_usual(type, payload, key, headers, deliver_at, content_type) is not true then
        fault := outbox.event_fault(type, payload, key, headers, deliver_at, content_type,
                                    nullif(current_setting('outbox.max_payload_bytes', true), ''));
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
    end if;
    if uid is null then
        uid := outbox.uuid7();
    elsif not outbox.claim_uid(uid, outbox.emitter()) then
        return uid;
    end if;
    insert into outbox.event (shard, uid, type, key, payload, content_type, headers, deliver_at, emitter)
    values (outbox.shard_of(key, uid), uid, type, key, payload, content_type, headers, deliver_at, outbox.emitter());
    if outbox.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;

create or replace function outbox.emit(
    type text,
    payload jsonb,
    key text default null,
    headers jsonb default null,
    deliver_at timestamptz default null,
    uid uuid default null
) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    body bytea := convert_to(payload::text, 'UTF8');
    fault text;
begin
    if outbox.is_usual(type, body, key, headers, deliver_at, 'application/json') is not true then
        fault := outbox.event_fault(type, body, key, headers, deliver_at, 'application/json',
                                    nullif(current_setting('outbox.max_payload_bytes', true), ''));
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
    end if;
    if uid is null then
        uid := outbox.uuid7();
    elsif not outbox.claim_uid(uid, outbox.emitter()) then
        return uid;
    end if;
    insert into outbox.event (shard, uid, type, key, payload, content_type, headers, deliver_at, emitter)
    values (outbox.shard_of(key, uid), uid, type, key, body, 'application/json', headers, deliver_at, outbox.emitter());
    if outbox.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Reading and settling
-- ---------------------------------------------------------------------------------------------------------

-- As in version 2, without erased events.
create or replace function outbox.read_rest(
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
                  or (w.deliver_at >= '0001-01-01 00:00:00+00' and w.deliver_at < '9999-01-01 00:00:00+00')
                then w.deliver_at end,
           case when ceiling is null
                  or (w.created_at >= '0001-01-01 00:00:00+00' and w.created_at < '9999-01-01 00:00:00+00')
                then w.created_at
                else least(greatest(w.created_at, '0001-01-01 00:00:00+00'), '9998-12-31 00:00:00+00') end,
           w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when ceiling is null then 0
                               else case when f.fault is null or octet_length(f.key) <= 1024
                                         then coalesce(octet_length(f.key), 0) else 0 end
                                    + coalesce(octet_length(f.headers), 0) end)
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
                   and (types is null or l.type like any (types)) and not outbox.is_erased(l.content_type, l.payload)
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

-- As in version 2, without erased events.
create or replace function outbox.read_late(
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
        select * from outbox.read_rest(shards, types, a, b, after_id, last_id, most_rows, most_bytes, most_payload);
    else
    return query
    select w.id, w.shard, w.uid::text, w.type,
           case when w.fault is null or octet_length(w.key) <= 1024 then w.key end,
           case when w.fault is null then w.payload end, w.content_type, w.headers,
           case when w.fault is null
                  or (w.deliver_at >= '0001-01-01 00:00:00+00' and w.deliver_at < '9999-01-01 00:00:00+00')
                then w.deliver_at end,
           case when ceiling is null
                  or (w.created_at >= '0001-01-01 00:00:00+00' and w.created_at < '9999-01-01 00:00:00+00')
                then w.created_at
                else least(greatest(w.created_at, '0001-01-01 00:00:00+00'), '9998-12-31 00:00:00+00') end,
           w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when ceiling is null then 0
                               else case when f.fault is null or octet_length(f.key) <= 1024
                                         then coalesce(octet_length(f.key), 0) else 0 end
                                    + coalesce(octet_length(f.headers), 0) end)
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
                   and not outbox.is_erased(l.content_type, l.payload)
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

-- As in version 1. No row is made of an erased event: the settlement fails, and a session that begins again does not read
-- the event any more.
create or replace function outbox.settle(
    sink_name text, owner_id uuid,
    shards smallint[], epochs bigint[], places integer[],
    a_seqs bigint[], a_snapshots pg_snapshot[], a_nexts bigint[],
    b_seqs bigint[], b_snapshots pg_snapshot[], b_nexts bigint[], last_ids bigint[],
    ids bigint[], states text[], ordereds boolean[], due_in double precision[], attempt_counts integer[], claim_counts integer[],
    leases uuid[], lease_for double precision[], errors text[], statuses integer[], last_attempts text[],
    fence_shards smallint[], fence_epochs bigint[]
) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    mine integer;
    stored integer;
    wanted integer;
begin
    if cardinality(ids) > 0 then
        select count(*) into mine from (
            select 1 from unnest(fence_shards, fence_epochs) f (shard, epoch)
              join outbox.shard s on s.sink = sink_name and s.shard = f.shard and s.epoch = f.epoch and s.owner = owner_id
             order by s.shard
               for share of s
        ) locked;
        if mine <> cardinality(fence_shards) then
            return false;
        end if;
        insert into outbox.delivery (
            sink, id, shard, state, ordered, due_at, attempts, claims, lease, lease_until, owner, last_error, last_status,
            last_attempt_at, last_attempt, uid, type, key, payload, content_type, headers, deliver_at, created_at
        )
        select sink_name, e.id, e.shard, r.state, r.ordered,
               coalesce(clock_timestamp() + r.due_in * interval '1 second', e.deliver_at, clock_timestamp()),
               r.attempts, r.claims, r.lease, clock_timestamp() + r.lease_for * interval '1 second',
               case when r.lease is not null then owner_id end, r.error, r.status,
               case when r.attempts > 0 or r.lease is not null or r.last_attempt is not null then clock_timestamp() end,
               r.last_attempt::jsonb,
               e.uid, e.type, e.key, e.payload, e.content_type, e.headers, e.deliver_at, e.created_at
          from unnest(ids, states, ordereds, due_in, attempt_counts, claim_counts, leases, lease_for, errors, statuses,
                      last_attempts)
               r (id, state, ordered, due_in, attempts, claims, lease, lease_for, error, status, last_attempt)
          join outbox.event e on e.id = r.id and not outbox.is_erased(e.content_type, e.payload)
        on conflict (sink, id) do nothing;
        -- Not joined: a plan made while there was no row would go through all rows of the sink for each id.
        select count(*) into stored from outbox.delivery d where d.sink = sink_name and d.id = any (ids);
        select count(distinct r.id) into wanted from unnest(ids) r (id);
        if stored <> wanted then
            raise exception 'outbox.settle: % of % events are no longer in the log', wanted - stored, wanted;
        end if;
    end if;
    if cardinality(shards) > 0 then
        insert into outbox.progress (
            sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id
        )
        select sink_name, t.shards, t.epochs, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, p.last_id
          from unnest(a_seqs, a_snapshots, a_nexts, b_seqs, b_snapshots, b_nexts, last_ids)
               with ordinality p (a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id, place)
         cross join lateral (
            select array_agg(m.shard order by m.shard) as shards, array_agg(m.epoch order by m.shard) as epochs
              from unnest(shards, epochs, places) m (shard, epoch, place) where m.place = p.place
         ) t;
    end if;
    return true;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Erase
-- ---------------------------------------------------------------------------------------------------------

-- An erasure that is under way, without the key or uid itself. All events of its subject are looked at before the first
-- is changed: in ids (place, upto_id], first in phase "looking", then again in phase "erasing".
--
-- What was looked at is what `snapshot` shows. It stays delivered while `config` is the same on the same server: every
-- action that puts positions back raises that counter, and all else moves them forward. Otherwise all is looked at again.
create table outbox.erasure (
    id bigint primary key generated always as identity,
    subject jsonb not null,
    role_name text not null default outbox.emitter(),
    login text not null default session_user,
    began_at timestamptz not null default clock_timestamp(),
    phase text not null default 'looking' check (phase in ('looking', 'erasing', 'audit', 'sinks')),
    place bigint not null default 0,
    upto_id bigint,
    snapshot pg_snapshot,
    config bigint,
    server text,
    matched bigint not null default 0,
    done bigint not null default 0,
    left_over bigint not null default 0,
    first_at timestamptz,
    audit_id bigint
);

-- Read the subject of an erasure: an object with a key or a uid, and nothing else.
create function outbox.read_subject(subject jsonb, out key text, out uid uuid)
language plpgsql immutable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
begin
    if jsonb_typeof(subject) is distinct from 'object' or (select count(*) from jsonb_object_keys(subject)) <> 1
       or not subject ?| '{key, uid}' then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'the subject of an erasure must be a JSON object with either "key" or "uid"';
    end if;
    key := subject ->> 'key';
    if jsonb_typeof(coalesce(subject -> 'key', subject -> 'uid')) <> 'string' or octet_length(key) > 1024
       or (subject ->> 'uid') collate "C" !~* '^[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}$' then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'key must be a string of at most 1024 bytes, and uid a UUID, as emit returns it';
    end if;
    uid := (subject ->> 'uid')::uuid;
end
$$;

-- The subject of an erasure as a filter, of which the audit keeps hashes alone.
create function outbox.filter_of_subject(key text, uid uuid) returns jsonb
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select case when key is not null then jsonb_build_object('key', key)
                else jsonb_build_object('uids', jsonb_build_array(uid)) end
$$;

-- Refuse what would fail in the middle: a uid that nothing is known of; a publication of updates of tables that have no
-- replica identity, which PostgreSQL refuses to change then; a partition in which the shard would follow the key.
create function outbox.check_erasable(uid uuid) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
declare
    found_one text;
begin
    if uid is not null
       and not exists (select from outbox.event e where e.uid = check_erasable.uid)
       and not exists (select from outbox.delivery d where d.uid = check_erasable.uid)
       and not exists (select from outbox.attempt a where a.uid = check_erasable.uid)
       and not exists (select from outbox.discarded m where m.uid = check_erasable.uid) then
        raise exception using errcode = 'no_data_found', message = format('no event %s is known', uid);
    end if;
    select p.pubname into found_one
      from pg_publication p
      join pg_publication_tables t on t.pubname = p.pubname
      join outbox.content_columns() n on n.part = format('%I.%I', t.schemaname, t.tablename)::regclass
      join pg_class c on c.oid = n.part
     where p.pubupdate and t.schemaname = 'outbox' and c.relreplident in ('d', 'n')
       and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary and c.relreplident = 'd')
     limit 1;
    if found_one is not null then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('publication %1$I publishes updates of the log, which has no replica identity: PostgreSQL would '
                             'refuse to erase an event; alter publication %1$I set (publish = ''insert'') leaves them out',
                             found_one);
    end if;
    select a.attrelid::regclass::text into found_one
      from pg_inherits i join pg_attribute a on a.attrelid = i.inhrelid and a.attname = 'shard' and a.attgenerated <> ''
     where i.inhparent = 'outbox.event'::regclass limit 1;
    if found_one is not null then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('partition %1$s computes the shard from the key, as before schema version 9, and would move an '
                             'erased event to another shard: detach it, alter table %1$s alter column shard drop '
                             'expression, and attach it again', found_one);
    end if;
end
$$;

-- The next events that an erasure looks at or changes: ids behind `after_id`, at most `most_ids` of them, and at most 200
-- events, or 8 MiB. `next_id` is the last id that was looked at. Ids that neither an event nor a delivery has are passed
-- over. Events that were committed since `snapshot` are left out, and `later` counts them: those above the floor, since
-- nothing was added to the others, which carry numbers of another server.
create function outbox.next_of_subject(
    key text, uid uuid, snapshot pg_snapshot, after_id bigint, upto_id bigint, most_ids integer,
    out ids bigint[], out next_id bigint, out later bigint
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
#variable_conflict use_variable
declare
    most constant integer := 200;
    most_bytes constant bigint := 8388608;
    wanted_shard constant smallint := outbox.shard_of(key, '00000000-0000-0000-0000-000000000000');
    numbering_floor constant bigint := (select m.floor from outbox.meta m);
    low bigint := after_id;
    last_id bigint;
begin
    next_id := upto_id;
    if uid is null then
        low := least((select min(e.id) from outbox.event e where e.id > after_id),
                     (select min(d.id) from outbox.delivery d where d.id > after_id)) - 1;
        next_id := least(coalesce(low + most_ids, upto_id), upto_id);
    end if;
    select array_agg(f.id order by f.id) filter (where f.shown), count(*) filter (where not f.shown),
           case when bool_or(f.is_last) then max(f.id) end
      into ids, later, last_id
      from (
        select c.id, c.id <= numbering_floor or pg_visible_in_snapshot(c.xid, snapshot) as shown,
               c.n = most or c.bytes >= most_bytes as is_last
          from (
            select r.id, r.xid, row_number() over (order by r.id) as n, sum(r.size) over (order by r.id) as bytes,
                   sum(r.size) over (order by r.id) - r.size as before
              from (
                (select e.id, e.xid, coalesce(pg_column_size(e.payload), 0) as size
                   from outbox.event e
                  where uid is null and e.id > low and e.id <= next_id and e.shard = wanted_shard
                    and e.key = next_of_subject.key
                  order by e.id limit most)
                union all
                (select e.id, e.xid, coalesce(pg_column_size(e.payload), 0)
                   from outbox.event e
                  where e.uid = next_of_subject.uid and e.id > low and e.id <= next_id
                    and not outbox.is_erased(e.content_type, e.payload)
                  order by e.id limit most)
              ) r
          ) c
         where c.n = 1 or c.before < most_bytes
      ) f;
    ids := coalesce(ids, '{}');
    next_id := coalesce(last_id, next_id);
end
$$;

-- Events that a relay may still deliver: those with a row of a sink or replay, in any state, and those that the position
-- of a sink has not passed, if it takes their type, or if its shard has an owner, which may deliver by earlier patterns; and
-- those that a replay means and has not passed, until it has ended and no relay serves it. A
-- shard with an owner counts only as far as that owner has written its position: the next one begins where any has. At most
-- `most` are named.
--
-- One statement, and so one snapshot: a settlement turns an unpassed event into one with a row.
create function outbox.undelivered(event_ids bigint[], most integer default 20)
returns table (uid uuid, sink text, state text)
language sql stable rows 20
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
    with looked_at as materialized (
        select e.id, e.xid, e.uid, e.shard, e.type, e.key, e.content_type, e.created_at, e.deliver_at
          from outbox.event e where e.id = any (event_ids)
    ),
    readers as materialized (
        select k.name, l.shard, h.owner is not null as owned, outbox.types_of(k.name) as types, m.floor, p.a_seq, p.a_snapshot,
               p.a_next, p.b_snapshot, p.last_id, p.a_seq is not null and (h.owner is null or p.epoch = h.epoch) as counts
          from outbox.sink k
         cross join outbox.meta m
         cross join (select distinct l.shard from looked_at l) l
          left join outbox.shard h on h.sink = k.name and h.shard = l.shard
          left join outbox.standing p on p.sink = k.name and p.shard = l.shard
    )
    select d.uid, d.sink::text, outbox.delivery_state(d.state, d.ordered, d.deliver_at)
      from looked_at l join outbox.delivery d on d.uid = l.uid
     where d.sink >= '~' or exists (select from outbox.sink k where k.name = d.sink)
    union
    select l.uid, r.name::text, case when l.deliver_at > now() then 'scheduled' else 'pending' end
      from looked_at l
      join readers r on r.shard = l.shard
     where (r.owned or r.types is null or l.type like any (r.types))
       and not (r.counts and outbox.position_passed(l.id, l.xid, r.a_seq, r.a_snapshot, r.a_next, r.b_snapshot, r.last_id,
                                                    r.floor))
       and not exists (select from outbox.delivery d where d.uid = l.uid and d.sink = r.name)
    union
    select l.uid, '~' || r.id, 'pending'
      from looked_at l
      join outbox.replay r on not r.cleared and r.from_id < l.id and r.upto_id >= l.id
     where (r.ids is null or l.id = any (r.ids))
       and outbox.replay_means(l.id, l.xid, l.shard, l.type, l.key, l.content_type, l.created_at, r.type_like, r.routed,
                               r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts, r.b_snapshots,
                               r.last_ids)
       and not exists (select from outbox.replay_places(r.id) p where p.shard = l.shard and p.last_id >= l.id)
     limit most
$$;

-- The same as JSON, and copies with the key whose events the log no longer has, of ids behind `low`, up to `high`; or copies
-- of the uid. Null: there are none.
create function outbox.undelivered_of_subject(key text, uid uuid, ids bigint[], low bigint, high bigint) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
    select jsonb_agg(jsonb_build_object('uid', u.uid, 'sink', u.sink, 'state', u.state) order by u.uid, u.sink)
      from (
        select n.uid, n.sink, n.state from outbox.undelivered(ids) n
        union
        (select d.uid, d.sink::text, outbox.delivery_state(d.state, d.ordered, d.deliver_at)
           from outbox.delivery d
          where undelivered_of_subject.uid is null and d.id > low and d.id <= high and d.key = undelivered_of_subject.key
            and not exists (select from outbox.event e where e.uid = d.uid and e.created_at = d.created_at)
            and (d.sink >= '~' or exists (select from outbox.sink k where k.name = d.sink))
          limit 20)
        union
        (select d.uid, d.sink::text, outbox.delivery_state(d.state, d.ordered, d.deliver_at)
           from outbox.delivery d
          where d.uid = undelivered_of_subject.uid
            and (d.sink >= '~' or exists (select from outbox.sink k where k.name = d.sink))
          limit 20)
      ) u
$$;

-- Begin an erasure, or begin its look again.
create function outbox.look_again(erasure_id bigint) returns outbox.erasure
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    config_now constant bigint := (select m.config from outbox.meta m);
    snap constant pg_snapshot := pg_current_snapshot();  -- after the counter, and before the last id
    e outbox.erasure;
begin
    update outbox.erasure o
       set phase = 'looking', place = 0, matched = 0, left_over = 0, config = config_now, snapshot = snap,
           server = outbox.incarnation(),
           upto_id = greatest(pg_sequence_last_value('outbox.event_id_seq'), (select max(d.id) from outbox.delivery d), 0)
     where o.id = erasure_id
    returning o.* into e;
    return e;
end
$$;

-- The erasure with this number, locked, which must be this session's and of this subject; a new one for null.
create function outbox.open_erasure(erasure_id bigint, subject jsonb) returns outbox.erasure
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    hashed constant jsonb := outbox.hashed_filter(subject);
    e outbox.erasure;
begin
    if erasure_id is not null then
        select * into e from outbox.erasure o
         where o.id = erasure_id and o.role_name = outbox.emitter() and o.login = session_user
           and o.subject = hashed and o.began_at > clock_timestamp() - interval '1 day'
           for update;
        if not found then
            raise exception using errcode = 'invalid_parameter_value',
                message = format('erasure_id %s is not the number of an erasure of today with this role and subject',
                                 erasure_id),
                hint = 'Leave erasure_id out to begin a new one.';
        end if;
        return e;
    end if;
    delete from outbox.erasure o where o.began_at < clock_timestamp() - interval '1 day';
    insert into outbox.erasure (subject) values (hashed) returning id into e.id;
    return outbox.look_again(e.id);
end
$$;

-- Archives of these partitions that were verified, or are being written, hold their events as they were: they are
-- superseded, which keeps their names, and the days are checked and archived again. Each day gets a row, so that a check that runs meanwhile either
-- waits here and sees what was erased, or has its row changed. Called last, since a day that is emptied waits for the rows.
create function outbox.supersede_archives(parts regclass[]) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    insert into outbox.day as d (day, part)
    select p.day, 1 + coalesce((select max(o.part) from outbox.day o where o.day = p.day), 0)
      from outbox.partitions() p
     where p.part = any (parts)
     order by p.day
        on conflict (day) where emptied_at is null do update
       set checked_snapshot = null, archived_snapshot = null, archived_to = null, sha256 = null, events = null
$$;

-- Change the events of an erasure with these ids, of which `later` others were left out. What was recorded of their attempts
-- and discards goes too, and rows of sinks that no longer exist.
create function outbox.change_events(
    e outbox.erasure, key text, uid uuid, ids bigint[], later bigint, upto_id bigint
) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
#variable_conflict use_variable
declare
    uids uuid[];
    parts regclass[];
    earliest timestamptz;
begin
    with husks as (
        update outbox.event v
           set payload = '', headers = null, key = null, content_type = 'application/x-erased'
         where v.id = any (ids) and (v.key = change_events.key or v.uid = change_events.uid)
        returning v.uid, v.tableoid::regclass as part, v.created_at
    )
    select array_agg(h.uid), array_agg(distinct h.part), min(h.created_at) into uids, parts, earliest from husks h;
    update outbox.erasure o
       set done = o.done + coalesce(cardinality(uids), 0), left_over = o.left_over + later,
           first_at = least(o.first_at, earliest)
     where o.id = e.id;
    uids := uids || change_events.uid;
    update outbox.attempt a set error = null, detail = null
     where a.uid = any (uids) and (a.error is not null or a.detail is not null);
    update outbox.discarded m set reason = 'erased' where m.uid = any (uids) and m.reason <> 'erased';
    delete from outbox.delivery d
     where (d.uid = any (uids) or (d.id > e.place and d.id <= upto_id and d.key = change_events.key))
       and d.sink < '~' and not exists (select from outbox.sink k where k.name = d.sink);
    perform outbox.supersede_archives(parts) where parts is not null;
end
$$;

-- Replace a key by its hash where the audit says it as a word, which is of at least 4 characters. A row of the audit tells
-- which rows were changed. Nothing is changed for a key of which no event was erased.
create function outbox.erase_in_audit(key text, by_actor text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    hash constant text := outbox.keyed_hash(key);
    subject constant jsonb := outbox.filter_of_subject(key, null);
    word constant text := '(?<![[:alnum:]_])' || regexp_replace(key collate "C", '([!-/:-@[-`{-~])', '\\\1', 'g')
                          || '(?![[:alnum:]_])';
    changed bigint[];
begin
    if length(key) < 4 or not exists (select from outbox.audit a
                                       where a.action = 'erase' and a.filter = outbox.hashed_filter(subject) and a.count > 0) then
        return;
    end if;
    with quoting as (
        update outbox.audit a
           set reason = regexp_replace(a.reason collate "C", word, hash, 'g'),
               filter = case when a.filter ? 'error'
                             then a.filter || jsonb_build_object('error', regexp_replace((a.filter ->> 'error') collate "C",
                                                                                         word, hash, 'g'))
                             else a.filter end
         where (strpos(a.reason, key) > 0 and a.reason collate "C" ~ word)
            or (strpos(a.filter ->> 'error', key) > 0 and (a.filter ->> 'error') collate "C" ~ word)
        returning a.id
    )
    select array_agg(q.id order by q.id) into changed from quoting q;
    if changed is not null then
        perform outbox.record_action('erase in audit', null, subject || jsonb_build_object('rows', to_jsonb(changed[1:100])),
                                     cardinality(changed), by_actor, null);
    end if;
end
$$;

-- Last errors of sinks since the first erased event go: they may quote an answer. Where another one, or the reason of a
-- pause or replay, says a key of at least 4 characters, the key is replaced by its hash, and so is the key of a replay that
-- has ended. In a transaction of its own: relays wait for the rows, and what holds the row of `meta` must not wait for sinks.
create function outbox.erase_in_sinks(key text, since timestamptz) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
    update outbox.sink k set last_error = null
     where k.last_error_at >= since and k.last_error not like 'client: %';
    update outbox.sink k
       set last_error = replace(k.last_error, key, outbox.keyed_hash(key)),
           paused_reason = replace(k.paused_reason, key, outbox.keyed_hash(key))
     where length(key) >= 4 and (strpos(k.last_error, key) > 0 or strpos(k.paused_reason, key) > 0);
    update outbox.replay r set key = outbox.keyed_hash(key) where r.key = erase_in_sinks.key and r.cleared;
    update outbox.replay r set reason = replace(r.reason, key, outbox.keyed_hash(key))
     where length(key) >= 4 and strpos(r.reason, key) > 0;
end
$$;

-- The archives that may hold what was erased: superseded ones, and those of days that were emptied. An event that is in the
-- log is in none of the latter; a uid that the database made is in those around its day.
create function outbox.archives_of_subject(in_log boolean, uid uuid) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select coalesce(jsonb_agg(a.address order by a.address), '[]')
      from (
        select u.address from outbox.day d, unnest(d.unfinished || d.writing_to) u (address) where u.address is not null
        union
        (select d.archived_to
           from outbox.day d
          cross join (select case when get_byte(uuid_send(uid), 6) >> 4 = 7
                                  then to_timestamp(('x' || encode(substring(uuid_send(uid) from 1 for 6), 'hex'))::bit(48)::bigint
                                                    / 1000.0)::date end) m (made_on)
          where d.archived_to is not null and d.emptied_at is not null and (uid is null or not in_log)
            and (m.made_on is null or d.day = '-infinity' or d.day between m.made_on - 32 and m.made_on + 1)
          order by d.emptied_at desc limit 1000)
      ) a (address)
$$;

-- One step of an erasure: the events with a key, or the one with a uid, lose payload, headers and key. `subject` is
-- {"key": "..."} or {"uid": "..."}. The first step returns a number, which the others are given. Call it until `phase` is
--
-- - refused: `undelivered` names up to 20 events that a relay may still deliver. Only if `done` is not 0, events that were
--   looked at before were erased.
-- - done: `matched` events were found, and `done` of them erased. `left_over` were committed since the look began, and are
--   as they were.
--
-- Then `archives` are those that may hold the events; `key_hash` is how their manifests list the key; `statistics` names
-- what the server keeps values in. With `dry_run` it only looks. A step looks at no more than `most_ids` ids.
--
-- The step that changes events locks the log, then the row of `meta`, for which every change of the configuration waits.
create function outbox.erase(
    subject jsonb, actor text default null, reason text default null, dry_run boolean default false,
    most_ids integer default 100000, inout erasure_id bigint default null,
    out phase text, out place bigint, out upto_id bigint, out matched bigint, out done bigint, out left_over bigint,
    out undelivered jsonb, out archives jsonb, out key_hash text, out statistics text[]
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '2s'
as $$
#variable_conflict use_variable
declare
    s record := outbox.read_subject(subject);
    filter constant jsonb := outbox.filter_of_subject(s.key, s.uid);
    only_look constant boolean := coalesce(dry_run, false);
    e outbox.erasure;
    next record;
begin
    perform outbox.end_when_idle(), outbox.require_read_committed('outbox.erase'), outbox.at_home();
    if coalesce(trim(reason), '') = '' and not only_look then
        raise exception using errcode = 'invalid_parameter_value', message = 'an erasure needs a reason';
    end if;
    if erasure_id is null then
        perform outbox.check_erasable(s.uid);
    end if;
    e := outbox.open_erasure(erasure_id, filter);
    erasure_id := e.id;
    if e.phase = 'erasing' then
        lock table outbox.event in row exclusive mode;
        perform from outbox.meta for share;
        perform set_config('synchronous_commit', 'on', true)
          where current_setting('synchronous_commit') in ('off', 'local');
    end if;
    if e.phase in ('looking', 'erasing') then
        if e.config <> (select m.config from outbox.meta m) or e.server <> outbox.incarnation() then
            e := outbox.look_again(e.id);
        end if;
        select * into next
          from outbox.next_of_subject(s.key, s.uid, e.snapshot, e.place, e.upto_id,
                                      least(greatest(coalesce(most_ids, 100000), 1), 1000000));
        undelivered := outbox.undelivered_of_subject(s.key, s.uid, next.ids, e.place, next.next_id);
    end if;
    if undelivered is not null then
        e.phase := 'refused';
    elsif e.phase = 'looking' then
        update outbox.erasure o
           set place = case when next.next_id < o.upto_id then next.next_id else 0 end,
               phase = case when next.next_id < o.upto_id then 'looking' else 'erasing' end,
               matched = o.matched + cardinality(next.ids)
         where o.id = e.id returning o.* into e;
        e.phase := case when only_look and e.phase <> 'looking' then 'done' else e.phase end;
    elsif e.phase = 'erasing' then
        perform outbox.change_events(e, s.key, s.uid, next.ids, next.later, next.next_id);
        update outbox.erasure o
           set place = next.next_id, phase = case when next.next_id < o.upto_id then 'erasing' else 'audit' end,
               audit_id = outbox.record_action('erase', null, filter, o.done - e.done, actor, reason, o.audit_id)
         where o.id = e.id returning o.* into e;
    elsif e.phase = 'audit' then
        perform outbox.erase_in_audit(s.key, actor);
        update outbox.erasure o set phase = 'sinks' where o.id = e.id returning o.* into e;
    else
        perform outbox.erase_in_sinks(s.key, e.first_at);
        perform outbox.renew_key_statistics();
        e.phase := 'done';
    end if;
    phase := e.phase;
    place := e.place;
    upto_id := e.upto_id;
    matched := e.matched;
    done := e.done;
    left_over := e.left_over;
    if phase in ('refused', 'done') then
        archives := outbox.archives_of_subject(e.matched + e.done > 0, s.uid);
        key_hash := outbox.keyed_hash(s.key);
        statistics := outbox.content_statistics();
        delete from outbox.erasure o where o.id = e.id;
    end if;
end
$$;
