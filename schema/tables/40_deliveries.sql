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
    replay bigint,
    emitter oid,
    tenant text collate "C",
    turn text collate "C",
    ready boolean,
    primary key (id, sink)
) with (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
comment on table outbox.delivery is
    'Events that need care of their own in a sink: waiting, scheduled, retried, dead, or in a queue.';
comment on column outbox.delivery.ordered is
    'Takes part in the order of its key: later events of the key wait behind this row. Events that wait for their part of spread_seconds do not.';
comment on column outbox.delivery.claims is
    'Claims since the last settlement: a message that kills the process is stopped by this count.';
comment on column outbox.delivery.suspect is
    'Claimed three times and never settled: it may have killed those who claimed it. A column of its own, for an index
that no claim changes before the third.';
comment on column outbox.delivery.replay is
    'The replay that left this dead letter.';
comment on column outbox.delivery.emitter is
    'The role that emitted the event, in the cluster where it did.';
comment on column outbox.delivery.tenant is
    'Whose event it is, in an application with several tenants.';
comment on column outbox.delivery.turn is
    'Whose turn it is, for sinks with fair_by = "tenant": the tenant of the event, or empty. Null: the row is of another sink.';
comment on column outbox.delivery.ready is
    'True: in the queue of a sink with claim = "rows". False: in it once it is due. Null: the row is of another sink.';
-- No statistics are kept of what erase removes.
alter table outbox.delivery alter last_error set statistics 0, alter last_attempt set statistics 0, alter payload set statistics 0, alter headers set statistics 0;
create index delivery_dead on outbox.delivery (sink, id) where (state = 'dead');
create index delivery_dead_key on outbox.delivery (sink, key, id) where (ordered and (state = 'dead'));
create index delivery_due on outbox.delivery (sink, due_at, id) where (state = 'waiting');
-- A sweep looks at the keys with held rows alone.
create index delivery_held on outbox.delivery (sink, key) where (state = 'held');
create index delivery_key on outbox.delivery (sink, key, id) where (ordered and (state <> 'dead'));
create index delivery_later on outbox.delivery (sink, due_at, id) where ((not ready) and (state = 'waiting'));
-- Rows of other sinks, dead ones, those that are not due, and those that may kill a relay are in neither index of the queue.
-- Every other row is in one of them, because the second one would cost as much as the first.
create index delivery_queue on outbox.delivery (sink, priority desc, due_at, id) where (ready and (state = 'waiting') and (not suspect) and (turn is null));
create index delivery_suspect on outbox.delivery (sink, due_at, id) where suspect;
create index delivery_turn on outbox.delivery (sink, turn, priority desc, due_at, id) where (ready and (state = 'waiting') and (not suspect) and (turn is not null));
create index delivery_uid on outbox.delivery (uid);
-- Rows that count for `pending_max` and have no place in the order of a key: all but events that wait for their part of
-- spread_seconds.
create index delivery_unordered on outbox.delivery (sink, id) where ((not ordered) and (state <> 'dead') and ((deliver_at is null) or (deliver_at <= since)));

-- Marks of what was discarded: without them, nothing would distinguish such an event from a delivered one.
create table outbox.discarded (
    sink text collate "C" not null,
    id bigint not null,
    uid uuid not null,
    at timestamptz not null default clock_timestamp(),
    role_name text not null default coalesce(nullif(current_setting('role'), 'none'), session_user::text),
    actor text,
    reason text not null,
    primary key (sink, id)
);
comment on table outbox.discarded is
    'Deliveries that an operator gave up.';
-- No statistics are kept of what erase removes.
alter table outbox.discarded alter reason set statistics 0;
create index discarded_uid on outbox.discarded (uid);

-- One row per recorded attempt, written by the statement that settles it. `number` counts the attempts of the event at
-- the sink from 1. `error` is redacted and has at most 500 characters, `detail` at most 2 KiB: never a payload or a header.
create table outbox.attempt (
    at timestamptz not null default clock_timestamp(),
    uid uuid not null,
    sink text collate "C" not null,
    id bigint not null,
    number integer not null,
    relay text not null,
    outcome text not null,
    status integer,
    milliseconds double precision,
    error text,
    detail jsonb
) partition by range (at);
comment on table outbox.attempt is
    'The recorded attempts to deliver, in partitions by day.';
comment on column outbox.attempt.outcome is
    'delivered; failed, and tried again later; refused by the destination for good; dead: failed for the last time.';
comment on column outbox.attempt.detail is
    'What else is known: code, steps and answer of a failed request; topic, partition and offset of a Kafka record.';
create index attempt_uid on outbox.attempt (uid);

-- A missing partition must never fail a settlement. Its rows are removed one by one, so they are found by their time.
create table outbox.attempt_default partition of outbox.attempt default;
-- No statistics are kept of what erase removes.
alter table outbox.attempt alter error set statistics 0, alter detail set statistics 0;
create index attempt_default_at on outbox.attempt_default (at);

-- A filter of deliveries, as outbox_internal.read_filter returns it. Null: not asked for.
create type outbox.delivery_filter as (
    sink text, type_like text, key text, error text, status integer, since timestamptz, until timestamptz, uids uuid[],
    states text[], kind text, as_of timestamptz, tenant text
);

-- A row as claims return it: the columns of an event that is read, whether it takes part in the order of its key, its counters,
-- its lease, whether it was tried before, the seconds since 1970 at which it was due, its place among those of the claim, and
-- where the walk over tenants ended.
create type outbox_internal.claimed_row as (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text, tenant text, ordered boolean, attempts integer, claims integer,
    lease uuid, tried boolean, due double precision, place integer, walk_end text
);
