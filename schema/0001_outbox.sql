-- The outbox: an append-only log of events, the sinks that read it, and the exceptions.
-- Events are never changed. A sink's progress is a position per shard in the ledger `progress`; only an event
-- that needs individual care becomes a row of `delivery`.

create schema outbox;
comment on schema outbox is 'Transactional outbox: events written with the business data, relayed to sinks.';

create table outbox.meta (
    single boolean primary key default true check (single),
    schema_version integer not null,
    min_relay integer not null,
    floor bigint not null default 0,
    floor_xid bigint not null default 3
);
comment on column outbox.meta.floor is
    'Ids up to this one carry transaction numbers of another numbering: see outbox.rebase.';
comment on column outbox.meta.floor_xid is 'The oldest transaction that ran at that rebase.';
comment on column outbox.meta.min_relay is
    'The oldest schema version that a relay may have been made for and still work on this one.';
insert into outbox.meta (schema_version, min_relay) values (0, 0);

-- Roles and their kinds of grants by `migrate`; a later migration grants them again on what it replaces.
create table outbox.grantee (
    role_name name not null,
    kind text not null check (kind in ('emit', 'relay')),
    primary key (role_name, kind)
);

-- ---------------------------------------------------------------------------------------------------------
-- The log
-- ---------------------------------------------------------------------------------------------------------

-- The cache stays 1: ids must be given out in the order in which they are asked for.
create sequence outbox.event_id_seq as bigint cache 1;

-- `xid` is the first column on purpose. Defaults are evaluated in column order, so a transaction has its xid
-- before it takes an id: any that starts after a tick has ids above the tick's sequence value. No role may
-- insert `id` or `xid`, or this would no longer hold.
create table outbox.event (
    xid xid8 not null default pg_current_xact_id(),
    id bigint not null default nextval('outbox.event_id_seq'),
    shard smallint not null generated always as
        ((hashtextextended(coalesce(key, uid::text collate "C"), 0) & 63)::smallint) stored,
    uid uuid not null,
    type text collate "C" not null,
    key text collate "C",
    payload bytea,
    content_type text not null,
    headers jsonb,
    deliver_at timestamptz,
    created_at timestamptz not null default clock_timestamp()
) partition by range (created_at);

create index event_id on outbox.event (id, shard);
create index event_xid on outbox.event (xid);
create index event_uid on outbox.event (uid);

-- A missing partition must never fail a business transaction.
create table outbox.event_default partition of outbox.event default;

-- uids that callers chose themselves, for their own idempotent retry.
create table outbox.uid (
    uid uuid primary key,
    created_at timestamptz not null default clock_timestamp()
);

-- ---------------------------------------------------------------------------------------------------------
-- Sinks, shards, positions
-- ---------------------------------------------------------------------------------------------------------

create table outbox.sink (
    name text collate "C" primary key,
    patterns text[] not null,
    generation bigint not null default 1,
    start text not null check (start in ('beginning', 'now')),
    paused boolean not null default false,
    paused_reason text,
    circuit text not null default 'closed' check (circuit in ('closed', 'open', 'half-open')),
    circuit_since timestamptz,
    in_flight_limit integer check (in_flight_limit > 0),
    last_error text,
    last_error_at timestamptz,
    created_at timestamptz not null default clock_timestamp()
);

-- Written on claim, renewal and release only. `lease_until` of a shard without an owner is when it was released.
create table outbox.shard (
    sink text collate "C" not null references outbox.sink (name) on delete cascade,
    shard smallint not null check (shard between 0 and 63),
    owner uuid,
    epoch bigint not null default 0,
    lease_until timestamptz not null default clock_timestamp(),
    crashes integer not null default 0,
    primary key (sink, shard)
) with (fillfactor = 50);

-- The ledger of positions: appended to, never updated. Of a shard the newest position by (epoch, seq) counts, see
-- `standing`. A position is (tick A, tick B or null, id of the last event done in the window from A to B). Shards that
-- stand at the same place share a row, each with the epoch of its owner: a row for each would be most of what a relay
-- writes.
create table outbox.progress (
    sink text collate "C" not null,
    seq bigint generated always as identity,
    shards smallint[] not null,
    epochs bigint[] not null,
    a_seq bigint not null,
    a_snapshot pg_snapshot not null,
    a_next bigint not null,
    b_seq bigint,
    b_snapshot pg_snapshot,
    b_next bigint,
    last_id bigint not null,
    primary key (sink, seq)
) with (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 2000);

-- The position of each shard.
create view outbox.standing as
select distinct on (p.sink, u.shard)
       p.sink, u.shard, u.epoch, p.seq, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, p.last_id
  from outbox.progress p
 cross join lateral unnest(p.shards, p.epochs) u (shard, epoch)
 order by p.sink, u.shard, u.epoch desc, p.seq desc;

-- One row per live relay process: membership and status.
create table outbox.relay (
    id uuid primary key,
    name text not null,
    version text not null,
    sinks text[] not null,
    started_at timestamptz not null default clock_timestamp(),
    seen_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- ---------------------------------------------------------------------------------------------------------
-- The exceptions
-- ---------------------------------------------------------------------------------------------------------

create table outbox.delivery (
    sink text collate "C" not null,
    id bigint not null,
    shard smallint not null,
    state text not null check (state in ('waiting', 'held', 'dead')),
    ordered boolean not null,
    due_at timestamptz not null,
    priority smallint not null default 0,
    attempts integer not null default 0,
    claims integer not null default 0,
    suspect boolean not null generated always as (claims >= 3) stored,
    lease uuid,
    lease_until timestamptz,
    owner uuid,
    last_error text,
    last_status integer,
    last_attempt_at timestamptz,
    last_attempt jsonb,
    since timestamptz not null default clock_timestamp(),
    uid uuid not null,
    type text collate "C" not null,
    key text collate "C",
    payload bytea,
    content_type text not null,
    headers jsonb,
    deliver_at timestamptz,
    created_at timestamptz not null,
    -- The id first: then a plan made while there was no row, or without statistics, looks rows up by both. By the sink
    -- alone it would go through all of its rows.
    primary key (id, sink)
) with (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
comment on column outbox.delivery.ordered is
    'Takes part in the order of its key: later events of the key wait behind this row. Scheduled events do not.';
comment on column outbox.delivery.claims is
    'Claims since the last settlement: a message that kills the process is stopped by this count.';
comment on column outbox.delivery.suspect is
    'Claimed three times and never settled: it may have killed those who claimed it. A column of its own, for an index
that no claim changes before the third.';

create index delivery_due on outbox.delivery (sink, due_at, id) where state = 'waiting';
create index delivery_key on outbox.delivery (sink, key, id) where ordered;
create index delivery_suspect on outbox.delivery (sink, due_at, id) where suspect;
create index delivery_dead on outbox.delivery (sink, id) where state = 'dead';
create index delivery_uid on outbox.delivery (uid);

-- ---------------------------------------------------------------------------------------------------------
-- emit
-- ---------------------------------------------------------------------------------------------------------

-- A UUIDv7 (RFC 9562, 5.7): milliseconds since 1970 in the first 48 bits, random bits after them. PostgreSQL has its
-- own from 18 on, which costs a third of this one.
create function outbox.uuid7() returns uuid
language sql volatile parallel safe
return encode(
    set_bit(
        set_bit(
            overlay(
                uuid_send(gen_random_uuid())
                placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                from 1 for 6
            ),
            52, 1
        ),
        53, 1
    ),
    'hex'
)::uuid;

do $$
begin
    if current_setting('server_version_num')::integer >= 180000 then
        execute 'create or replace function outbox.uuid7() returns uuid language sql volatile parallel safe return uuidv7()';
    end if;
end
$$;

-- The fault of a header mapping, or null. Names are HTTP tokens (RFC 9110, 5.6.2).
create function outbox.header_fault(headers jsonb) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    name text;
    value jsonb;
begin
    if jsonb_typeof(headers) <> 'object' then
        return format('headers must be a JSON object of strings, not %s', jsonb_typeof(headers));
    end if;
    if octet_length(headers::text) > 16384 then
        return format('headers must have at most 16384 bytes as JSON; these have %s', octet_length(headers::text));
    end if;
    for name, value in select * from jsonb_each(headers) loop
        if length(name) not between 1 and 255 or name collate "C" ~ '[^A-Za-z0-9!#$%&''*+.^_`|~-]' then
            return format('header name %s is not a token: 1 to 255 letters, digits or !#$%%&''*+-.^_`|~',
                          quote_literal(left(name, 60)));
        end if;
        if jsonb_typeof(value) <> 'string' then
            return format('the value of header %s must be a string, not %s', quote_literal(name), jsonb_typeof(value));
        end if;
        if (value #>> '{}') ~ '[\x01-\x08\x0a-\x1f\x7f]' then
            return format('the value of header %s has a control character', quote_literal(name));
        end if;
    end loop;
    return null;
end
$$;

-- The fault of an event, as a message, or null. `most` is the setting `outbox.max_payload_bytes` or null;
-- `outbox.event_index` is set by who emits many events with one statement, and says which of them was refused.
--
-- A regular expression with a bound such as {1,255} costs as much as the rest: lengths are compared. The caller's
-- collation may be one that regular expressions refuse: they get their own.
create function outbox.event_fault(
    type text, payload bytea, key text, headers jsonb, deliver_at timestamptz, content_type text, most text
) returns text
language sql stable
return 'outbox.emit: ' || coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', '') || case
    when type is null or length(type) not between 1 and 255 or type collate "C" ~ '[^\x21-\x29\x2b-\x7e]' then
        format('type must be 1 to 255 visible ASCII characters without space and "*"; this one has %s',
               coalesce(length(type)::text || ' characters', 'no value'))
    when payload is null then
        'payload must not be null'
    when most is not null and (length(most) > 9 or most collate "C" ~ '[^0-9]') then
        'the setting outbox.max_payload_bytes must be a number of bytes, below 1000000000'
    when octet_length(payload) > coalesce(most::integer, 1048576) then
        format('payload must have at most %s bytes (setting outbox.max_payload_bytes); this one has %s',
               coalesce(most, '1048576'), octet_length(payload))
    when octet_length(key) > 1024 then
        format('key must have at most 1024 bytes; this one has %s', octet_length(key))
    when content_type is null or length(content_type) not between 1 and 255
         or content_type collate "C" ~ '[^\x20-\x7e]' then
        'content_type must be 1 to 255 printable ASCII characters'
    when deliver_at is not null and not isfinite(deliver_at) then
        'deliver_at must be a finite time'
    when headers is not null then
        outbox.header_fault(headers)
end;

-- True if an event is as most are, and so has no fault. What it is silent about, event_fault looks at.
--
-- One expression, which takes the place of its call when emit is planned: an emit runs in a transaction of the
-- application. PostgreSQL makes every expression ready again in each transaction, at a price for each function in it,
-- which for all of event_fault is as much as half of the INSERT.
create function outbox.is_usual(
    type text, payload bytea, key text, headers jsonb, deliver_at timestamptz, content_type text
) returns boolean
language sql stable
return headers is null and deliver_at is null
       and octet_length(type) <= 255 and type collate "C" ~ '^[\x21-\x29\x2b-\x7e]+$'
       and octet_length(payload) <= 1048576 and coalesce(current_setting('outbox.max_payload_bytes', true), '') = ''
       and (key is null or octet_length(key) <= 1024)
       and content_type in ('application/json', 'application/octet-stream');

-- True if a relay sleeps: it then holds this lock exclusively, and only then is a notification worth its price, a lock
-- of the whole cluster at commit. Taken and given back in one expression, which leaves no point to be interrupted
-- between; nothing ever waits for it.
create function outbox.asleep() returns boolean
language sql volatile
return not (pg_try_advisory_lock_shared(1869967971, 1) and pg_advisory_unlock_shared(1869967971, 1));

-- Emits one event. `outbox.wake` is a setting for those who prepare transactions, which may not have notified anybody.
create function outbox.emit_raw(
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
    else
        insert into outbox.uid (uid) values (uid) on conflict do nothing;
        if not found then
            return uid;
        end if;
    end if;
    insert into outbox.event (uid, type, key, payload, content_type, headers, deliver_at)
    values (uid, type, key, payload, content_type, headers, deliver_at);
    if outbox.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;

-- The same for JSON. It has a body of its own: a call within the call costs the application some microseconds more.
create function outbox.emit(
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
    else
        insert into outbox.uid (uid) values (uid) on conflict do nothing;
        if not found then
            return uid;
        end if;
    end if;
    insert into outbox.event (uid, type, key, payload, content_type, headers, deliver_at)
    values (uid, type, key, body, 'application/json', headers, deliver_at);
    if outbox.asleep() then
        if current_setting('outbox.wake', true) is distinct from 'off' then
            perform pg_notify('outbox', '');
        end if;
    end if;
    return uid;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Reading
-- ---------------------------------------------------------------------------------------------------------

-- The identity of this server: it changes when it was restarted, failed over or recovered from the crash of a
-- backend. Refused by a standby. Before version 15 what is counted of the WAL is read from a file that is written for
-- every reader, so there it is left out. Its body takes the place of every call.
create function outbox.incarnation() returns text
language sql stable
return concat_ws(
    '/',
    extract(epoch from pg_postmaster_start_time()),
    left(pg_walfile_name(pg_current_wal_lsn()), 8),
    case when current_setting('server_version_num')::integer >= 150000
         then extract(epoch from (pg_stat_get_wal()).stats_reset) end
);

-- True on the server with this incarnation, an error (OR001) on any other. For statements that speak of ticks, or of
-- what was decided from what a server said: another one may have given out the same ids and transaction numbers for
-- other events, and a pooler may have sent the statement there without a word. Nothing is asked for null.
create function outbox.only_at(server text) returns boolean
language plpgsql stable
as $$
begin
    if server <> outbox.incarnation() then
        raise exception 'the server is another incarnation' using errcode = 'OR001';
    end if;
    return true;
end
$$;

-- A tick: what a sink's next window may end at. Its statements are separate on purpose: the sequence is read
-- before the snapshot. `next_xid` bounds the transactions that may be running above the snapshot's xmax, which
-- is only the newest finished xid plus one; leaving them out loses events. age() gives the next xid modulo
-- 2^32, or the caller's own if it has one: hence the assertion.
create function outbox.tick(
    out seq bigint, out snapshot pg_snapshot, out next_xid bigint, out incarnation text, out wal bigint,
    out now timestamptz, out generations bigint
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    xmax bigint;
begin
    if pg_current_xact_id_if_assigned() is not null then
        raise exception 'outbox.tick must be a transaction of its own';
    end if;
    select case when s.is_called then s.last_value else 0 end into seq from outbox.event_id_seq s;
    snapshot := pg_current_snapshot();
    xmax := pg_snapshot_xmax(snapshot)::text::bigint;
    next_xid := xmax + (((3 + age('3'::xid)::bigint) - xmax) & 4294967295);
    -- After the snapshot: who sees the old sum has a tick from before the change, so no window of an older
    -- configuration ends behind it and passes by events that only the newer one routes.
    select coalesce(sum(s.generation), 0) into generations from outbox.sink s;
    wal := pg_current_wal_lsn() - '0/0'::pg_lsn;
    now := clock_timestamp();
    incarnation := outbox.incarnation();
end
$$;

-- The window from tick A to tick B, second part: ids above A's sequence value, visible in B and not in A, in
-- id order, after `after_id` and up to `upto_id`. Below that value it finds the latecomers, id by id: for those that
-- stand close together.
--
-- At most `most_rows` events and, beyond the first, at most `most_bytes` of payload. The SET clauses fix the
-- plan without session state: one generic plan, in index order, nothing sorted. Left to itself PostgreSQL
-- plans again at every call, or reads and sorts the whole backlog for every chunk.
create function outbox.read_rest(
    shards smallint[], types text[], a pg_snapshot, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz
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
begin
    return query
    select w.id, w.shard, w.uid::text, w.type, w.key, w.payload, w.content_type, w.headers::text, w.deliver_at, w.created_at
      from (
        select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.headers, e.deliver_at, e.created_at,
               sum(octet_length(e.payload)) over (order by e.id rows unbounded preceding) as bytes
          from (
            select l.id, l.shard, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at, l.created_at
              from outbox.event l
             where l.id > after_id and l.id <= upto_id and l.shard = any (shards)
               and (types is null or l.type like any (types))
               and pg_visible_in_snapshot(l.xid, b) and not pg_visible_in_snapshot(l.xid, a)
             order by l.id
             limit most_rows
          ) e
      ) w
     where w.bytes - coalesce(octet_length(w.payload), 0) < most_bytes or w.bytes is null;
end
$$;

-- The window from tick A to tick B, first part: the latecomers, ids up to A's sequence value whose
-- transactions were running at A and are visible in B. Found through the index on xid, which `id + 0` and
-- `shard + 0` leave as the only one that fits; then sorted by id and cut.
create function outbox.read_late(
    shards smallint[], types text[], a pg_snapshot, a_next bigint, b pg_snapshot, after_id bigint, upto_id bigint,
    most_rows integer, most_bytes bigint
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz
)
language plpgsql stable rows 100
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set max_parallel_workers_per_gather = 0
as $$
#variable_conflict use_column
declare
    running xid8[] := array(select pg_snapshot_xip(a));
    above xid8 := pg_snapshot_xmax(a);
    below xid8 := a_next::text::xid8;
begin
    return query
    select w.id, w.shard, w.uid::text, w.type, w.key, w.payload, w.content_type, w.headers::text, w.deliver_at, w.created_at
      from (
        select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.headers, e.deliver_at, e.created_at,
               sum(octet_length(e.payload)) over (order by e.id rows unbounded preceding) as bytes
          from (
            select l.id, l.shard, l.uid, l.type, l.key, l.payload, l.content_type, l.headers, l.deliver_at, l.created_at
              from outbox.event l
             where (l.xid = any (running) or (l.xid >= above and l.xid < below))
               and l.id + 0 > after_id and l.id + 0 <= upto_id and (l.shard + 0) = any (shards)
               and (types is null or l.type like any (types))
               and pg_visible_in_snapshot(l.xid, b)
             order by l.id + 0
             limit most_rows
          ) e
      ) w
     where w.bytes - coalesce(octet_length(w.payload), 0) < most_bytes or w.bytes is null
     order by w.id;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Settling
-- ---------------------------------------------------------------------------------------------------------

-- One settlement of a sink, whole or not at all: new rows of `delivery`, then positions.
--
-- `shards`, `epochs` and `places` have one entry per shard that moved: the place, from 1, of its position in the arrays
-- behind them. Every array of the next group has one entry per new row, of the last one per shard of those rows. Rows are copied from the log. If there are rows, the fence comes first:
-- each of their shards must still have this owner and epoch, and stays so until this commits, because a claim
-- passes by rows that are locked. Returns false, and has written nothing, when the fence fails.
-- Positions alone need no fence: what they say is true whichever relay says it, and the epoch ranks them.
create function outbox.settle(
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
          join outbox.event e on e.id = r.id
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

-- True if the destination of a sink is known to be down: then nothing is settled, whatever those who try it die of, and
-- neither a shard's crashes nor a row's claims are counted. What is known is said again at least every minute.
create function outbox.known_down(sink_name text) returns boolean
language sql stable
return exists (
    select from outbox.sink k
     where k.name = sink_name and k.circuit <> 'closed' and k.last_error_at > clock_timestamp() - interval '90 seconds'
);

-- Claims rows of `delivery` that are due: sets owner, lease and `claims`, and returns their events.
--
-- A row of a key may be claimed when no earlier row of its sink and key takes part in the order: a condition
-- of the claim, not a state that somebody must change, so nothing can be left behind. With `hold`, dead rows
-- take part too. Waiting rows are found by the time they are due, held rows at the head of the given `keys`, or
-- of every key if `sweep`; they are due at once unless they were given back with a delay.
-- `with_followers` is for who delivers the rows of a key in order: they come with the first one, as many as there is
-- room for beside the first ones of other keys, up to a row that may not be claimed. What came back before, with an attempt
-- counted or without, comes alone: else the rows behind it are delivered, or written, each time that it comes back.
-- `suspects` asks for a row that was claimed three times and never settled, which may have killed its process: such a
-- row comes alone, and only to a caller that asks for it.
-- Waiting rows are locked as they are looked for, so that relays that come at the same time to rows that are due at the
-- same time find other ones each, and none finds only what another one takes.
create function outbox.claim_rows(
    sink_name text, owner_id uuid, lease_id uuid, lease_for double precision, most_rows integer, most_bytes bigint,
    hold boolean, keys text[], sweep boolean, suspects boolean, with_followers boolean
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, ordered boolean, attempts integer, claims integer
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    waiting bigint[];
    held bigint[];
    behind bigint[] := '{}';
    chosen bigint[];
    counted integer := case when outbox.known_down(sink_name) then 0 else 1 end;
begin
    if suspects then
        chosen := array(
            select d.id from outbox.delivery d
             where d.sink = sink_name and d.suspect and d.state <> 'dead' and d.due_at <= now()
               and (d.lease_until is null or d.lease_until <= now())
               and (not d.ordered or not exists (
                    select from outbox.delivery f
                     where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered
                       and (f.state <> 'dead' or hold)))
             order by d.due_at, d.id
             limit 1
               for update skip locked
        );
    else
        waiting := array(
            select d.id from outbox.delivery d
             where d.sink = sink_name and d.state = 'waiting' and d.due_at <= now()
               and (d.lease_until is null or d.lease_until <= now()) and not d.suspect
               and (not d.ordered or not exists (
                    select from outbox.delivery f
                     where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered
                       and (f.state <> 'dead' or hold)))
             order by d.due_at, d.id
             limit most_rows
               for update skip locked
        );
        if sweep then
            keys := array(
                with recursive blocked (key) as (
                    (select d.key from outbox.delivery d where d.sink = sink_name and d.ordered order by d.key limit 1)
                    union all
                    select (select d.key from outbox.delivery d
                             where d.sink = sink_name and d.ordered and d.key > b.key order by d.key limit 1)
                      from blocked b where b.key is not null
                )
                select b.key from blocked b where b.key is not null
            );
        end if;
        held := array(
            select h.id from unnest(keys) k (key)
             cross join lateral (
                select d.id, d.state, d.due_at, d.lease_until, d.suspect from outbox.delivery d
                 where d.sink = sink_name and d.key = k.key and d.ordered and (d.state <> 'dead' or hold)
                 order by d.id limit 1
             ) h
             where h.state = 'held' and h.due_at <= now()
               and (h.lease_until is null or h.lease_until <= now()) and not h.suspect
             limit most_rows
        );
        if with_followers and cardinality(waiting || held) between 1 and most_rows - 1 then
            behind := array(
                select r.id from outbox.delivery h
                 cross join lateral (
                    select d.id, d.due_at, d.lease_until, d.last_error, d.suspect from outbox.delivery d
                     where d.sink = sink_name and d.key = h.key and d.ordered and d.id > h.id and d.state <> 'dead'
                     order by d.id limit most_rows / cardinality(waiting || held)
                 ) r
                 where h.sink = sink_name and h.id = any (waiting || held) and h.ordered and h.last_error is null
                   and r.last_error is null and not r.suspect and r.due_at <= now()
                   and (r.lease_until is null or r.lease_until <= now())
            );
        end if;
        chosen := array(
            select c.id from (
                select b.id, b.follows, sum(b.bytes) over (order by b.follows, b.id) - b.bytes as before
                  from (
                    select d.id, d.id = any (behind) as follows, octet_length(d.payload) as bytes from outbox.delivery d
                     where d.sink = sink_name and d.id = any (waiting || held || behind)
                  ) b
            ) c
            where c.before < most_bytes or c.before is null
            order by c.follows, c.id
            limit most_rows
        );
        -- A statement of its own: joined to the change, a plan made while there was no row goes through all rows of the
        -- sink for each row that is claimed.
        if held <> '{}' or behind <> '{}' then
            chosen := array(
                select l.id from outbox.delivery l
                 where l.sink = sink_name and l.id = any (chosen) and l.state <> 'dead' and l.due_at <= now()
                   and (l.lease_until is null or l.lease_until <= now())
                   for update skip locked
            );
        end if;
        -- A row that must wait, or was claimed by another relay since it was looked for, may come before what is locked
        -- here.
        if behind <> '{}' then
            chosen := array(
                select i.id from (
                    select l.key, l.ordered, array_agg(l.id) as ids from outbox.delivery l
                     where l.sink = sink_name and l.id = any (chosen) group by l.key, l.ordered
                ) c
                 left join lateral (
                    select f.id from outbox.delivery f
                     where f.sink = sink_name and f.key = c.key and f.ordered and (f.state <> 'dead' or hold)
                       and f.id <> all (c.ids)
                     order by f.id limit 1
                ) other on c.ordered
                 cross join lateral unnest(c.ids) i (id)
                 where other.id is null or i.id < other.id
            );
        end if;
    end if;
    return query
    update outbox.delivery d
       set owner = owner_id, lease = lease_id, lease_until = clock_timestamp() + lease_for * interval '1 second',
           claims = d.claims + counted
     where d.sink = sink_name and d.id = any (chosen)
    returning d.id, d.shard, d.uid::text, d.type, d.key, d.payload, d.content_type, d.headers::text, d.deliver_at,
              d.created_at, d.ordered, d.attempts, d.claims;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Sinks
-- ---------------------------------------------------------------------------------------------------------

-- Makes the sinks of a configuration known, or gives them other patterns under a new generation, all in one
-- transaction. `wanted` is a JSON array of {"name", "patterns": [...], "start": "beginning" | "now" | null}.
-- The shards of a new sink and their first position, one tick for all, are written with it. Without `start`,
-- the sinks of the first configuration of a database begin at the beginning of the log, later ones at the tick.
-- After a rebase the beginning lies in the old numbering: its rows are read by a window of their own.
create function outbox.register_sinks(
    wanted jsonb, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint
) returns table (name text, generation bigint)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    first boolean;
    sink record;
    beginning boolean;
    rebased outbox.meta;
begin
    lock table outbox.sink in share row exclusive mode;
    first := not exists (select from outbox.sink);
    select * into rebased from outbox.meta m;
    for sink in
        select w.name, array(select jsonb_array_elements_text(w.patterns)) as patterns, w.start
          from jsonb_to_recordset(wanted) w (name text, patterns jsonb, start text)
    loop
        update outbox.sink s
           set patterns = sink.patterns, generation = s.generation + (s.patterns <> sink.patterns)::integer
         where s.name = sink.name;
        if not found then
            beginning := coalesce(sink.start = 'beginning', first);
            insert into outbox.sink (name, patterns, start)
            values (sink.name, sink.patterns, case when beginning then 'beginning' else 'now' end);
            insert into outbox.shard (sink, shard) select sink.name, n from generate_series(0, 63) n;
            insert into outbox.progress (
                sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id
            )
            select sink.name, array(select generate_series(0, 63)), array_fill(0, array[64]),
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
        select s.name, s.generation from outbox.sink s
         where s.name in (select w.name from jsonb_to_recordset(wanted) w (name text));
end
$$;

-- After a restore, or a move to another cluster, the transaction numbers that are stored mean nothing to the
-- server, and ids may be given out twice. This makes them harmless; run it while no relay runs. Returns the floor:
-- the largest id or sequence value that is known; the sequence continues above it.
--
-- Every shard gets a last window of the old numbering, from its old tick A to a tick in which everything is
-- visible: what A does not show is read once more, up to the floor, whatever was done of the window that was open.
-- `b_next` is the oldest transaction that runs now: behind that window the shard is at a tick of the floor
-- and of the snapshot that ends there, with none pending, because no emitter runs beside this lock.
create function outbox.rebase() returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    new_floor bigint;
    oldest bigint;
begin
    if exists (select from outbox.relay r where r.seen_at > clock_timestamp() - interval '30 seconds') then
        raise exception using errcode = 'object_in_use', message = 'relays are running: stop every relay first',
            hint = 'A relay that crashed counts as running for 30 seconds.';
    end if;
    lock table outbox.event, outbox.sink, outbox.shard, outbox.progress in access exclusive mode;
    select greatest(
               (select max(e.id) from outbox.event e),
               (select s.last_value from outbox.event_id_seq s),
               (select max(greatest(p.a_seq, p.b_seq, p.last_id)) from outbox.progress p)
           ) into new_floor;
    perform setval('outbox.event_id_seq', new_floor);
    oldest := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    update outbox.meta set floor = new_floor, floor_xid = oldest;
    update outbox.shard set epoch = epoch + 1, owner = null, lease_until = clock_timestamp();
    create temporary table rebased on commit drop as
        select p.sink, p.shard, s.epoch, p.a_seq, p.a_snapshot, p.a_next
          from outbox.standing p join outbox.shard s on s.sink = p.sink and s.shard = p.shard;
    delete from outbox.progress;
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select r.sink, array[r.shard], array[r.epoch], r.a_seq, r.a_snapshot, r.a_next,
           new_floor, '9223372036854775807:9223372036854775807:', oldest, 0
      from pg_temp.rebased r;
    return new_floor;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Backlog
-- ---------------------------------------------------------------------------------------------------------

-- The unsettled part of the log of a sink, as pieces for the two reading functions: ids in (after_id, upto_id], read
-- from tick A to the snapshot in which everything is visible, since a query sees only what is committed anyway.
-- Shards that stand at the same newest position share their pieces. Of a position (A, B, last) these are left:
-- the latecomers of A and the rest, both behind `last`; and up to `last` what is visible now and not in B, which
-- is the latecomers of B and, above B's sequence value, what was committed since.
-- The last window of an old numbering (see outbox.rebase) is left as it is read; above its end nothing is done.
create function outbox.unsettled(sink_name text) returns table (
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
$$;

-- Number of events of the log that a sink has not settled: `events` that are due, `scheduled` ones that are not, and
-- since when the `oldest` of the due ones waits. Events with a row in `delivery` are left out.
--
-- Exact while no more than `most` are due. Beyond that, or after `most_seconds` of looking for events among ids of
-- other sinks, reading stops and `events` is estimated: of each piece of the rest, by how dense the events were in the
-- ids that were read. Every piece is begun, for the sake of `oldest`.
create function outbox.backlog(
    sink_name text, types text[], most integer, most_seconds double precision,
    out events bigint, out exact boolean, out scheduled bigint, out oldest timestamptz
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
declare
    everything constant pg_snapshot := '9223372036854775807:9223372036854775807:';
    no_limit constant bigint := 9223372036854775807;
    span constant bigint := 500000;
    until constant timestamptz := clock_timestamp() + most_seconds * interval '1 second';
    newest constant bigint := (select s.last_value from outbox.event_id_seq s);
    piece record;
    chunk record;
    done_id bigint;
    last_id bigint;
    rows integer;
    due bigint;
begin
    events := 0;
    scheduled := 0;
    exact := true;
    for piece in
        select u.late, u.shards, u.a, u.a_next, u.after_id, least(u.upto_id, newest) as upto_id
          from outbox.unsettled(sink_name) u where u.after_id < newest order by u.after_id
    loop
        due := 0;
        done_id := piece.after_id;
        while done_id < piece.upto_id loop
            last_id := case when piece.late then piece.upto_id else least(piece.upto_id, done_id + span) end;
            rows := case when events > most then 100 when piece.late then most + 1 else least(most + 1, 2000) end;
            select count(*) as read, max(r.id) as last_id,
                   count(*) filter (where r.due) as due, count(*) filter (where not r.due) as scheduled,
                   min(greatest(r.created_at, r.deliver_at)) filter (where r.due) as oldest
              into chunk
              from (
                select e.id, e.created_at, e.deliver_at,
                       case when not exists (select from outbox.delivery d where d.sink = sink_name and d.id = e.id)
                            then e.deliver_at is null or e.deliver_at <= now() end as due
                  from (
                    select l.id, l.created_at, l.deliver_at
                      from outbox.read_late(piece.shards, types, piece.a, piece.a_next, everything,
                                            done_id, last_id, rows, no_limit) l
                     where piece.late
                    union all
                    select l.id, l.created_at, l.deliver_at
                      from outbox.read_rest(piece.shards, types, piece.a, everything,
                                            done_id, last_id, rows, no_limit) l
                     where not piece.late
                  ) e
              ) r;
            due := due + chunk.due;
            scheduled := scheduled + chunk.scheduled;
            oldest := least(oldest, chunk.oldest);
            done_id := case when chunk.read < rows then last_id else chunk.last_id end;
            if done_id < piece.upto_id and (events + due > most or clock_timestamp() > until) then
                exact := false;
                if not piece.late then
                    due := due * (piece.upto_id - piece.after_id) / (done_id - piece.after_id);
                end if;
                exit;
            end if;
        end loop;
        events := events + due;
    end loop;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Partitions
-- ---------------------------------------------------------------------------------------------------------

-- Makes the daily partitions (UTC) that are missing from today to `days_ahead` days ahead, and returns how many.
-- They begin above the newest row of the DEFAULT partition, so that attaching finds nothing to move.
-- SECURITY DEFINER because only the owner of the log may attach: the relay's role is not that.
create function outbox.make_partitions(days_ahead integer default 3) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
declare
    today timestamp := date_trunc('day', clock_timestamp() at time zone 'UTC');
    newest timestamptz;
    day timestamp;
    part text;
    made integer := 0;
begin
    if not pg_try_advisory_xact_lock(1869967971, 2) then
        return 0;
    end if;
    for day in select today + n * interval '1 day' from generate_series(0, least(greatest(days_ahead, 1), 30)) n loop
        part := 'event_' || to_char(day, 'YYYYMMDD');
        continue when to_regclass('outbox.' || part) is not null;
        select max(created_at) into newest from outbox.event_default;
        continue when newest >= day at time zone 'UTC';
        execute format('create table outbox.%I (like outbox.event including defaults including generated)', part);
        execute format('alter table outbox.event attach partition outbox.%I for values from (%L) to (%L)',
                       part, day at time zone 'UTC', (day + interval '1 day') at time zone 'UTC');
        made := made + 1;
    end loop;
    return made;
end
$$;

select outbox.make_partitions();

revoke all on all tables in schema outbox from public;
revoke all on all sequences in schema outbox from public;
revoke all on all functions in schema outbox from public;
