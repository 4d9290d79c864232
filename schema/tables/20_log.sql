-- The cache stays 1: ids must be given out in the order in which they are asked for.
create sequence outbox.event_id_seq as bigint cache 1;
comment on sequence outbox.event_id_seq is
    'The ids of events.';

-- `xid` is the first column on purpose. Defaults are evaluated in column order, so a transaction has its xid
-- before it takes an id: any that starts after a tick has ids above the tick's sequence value. No role may
-- insert `id` or `xid`, or this would no longer hold; outbox.emit_raw takes them in the same order.
--
-- Emit computes the shard. Who inserts otherwise, as the owner may, calls outbox_internal.shard_of. A subscription brings
-- the shards of its publisher.
--
-- A uid ends with the id of its event, which is found by that: see outbox_internal.event_id. Who inserts another uid puts it
-- into outbox.uid too, with the id.
create table outbox.event (
    xid xid8 not null default pg_current_xact_id(),
    id bigint not null default nextval('outbox.event_id_seq'),
    created_at timestamptz not null default clock_timestamp(),
    uid uuid not null,
    emitter oid,
    shard smallint not null,
    priority smallint,
    deliver_at timestamptz,
    emitted_at timestamptz,
    type text collate "C" not null,
    key text collate "C",
    tenant text collate "C",
    content_type text,
    headers jsonb,
    payload bytea
) partition by range (created_at);
comment on table outbox.event is
    'The log: every event, in partitions by day. Rows are never changed, except by an erasure.';
comment on column outbox.event.emitter is
    'The role that emitted the event, in the cluster where it did.';
comment on column outbox.event.content_type is
    'Null: application/json.';
comment on column outbox.event.tenant is
    'Whose event it is, in an application with several tenants.';
comment on column outbox.event.priority is
    'The rank that the application gave it; null: 0.';
comment on column outbox.event.emitted_at is
    'When a scheduled event was emitted; created_at is when it entered the log. Null: the event was not scheduled.';
create index event_id on outbox.event (id, shard);
create index event_xid_id on outbox.event (xid, ((id + 0)));

-- A missing partition must never fail a business transaction.
create table outbox.event_default partition of outbox.event default;
-- No statistics are kept of what erase removes.
alter table outbox.event alter key set statistics 0, alter payload set statistics 0, alter headers set statistics 0;
-- The past events of the DEFAULT partition, which one deletes in steps. Every other partition is looked at as a whole. The id
-- is hidden in an expression that no other statement has: else a plan for ids may go through this index from end to end.
create index event_default_created_at on outbox.event_default (created_at, ((id - 0)));

-- uids that callers chose themselves, for their own idempotent retry, and uids of events that rebase has given another id.
-- The emitter is a name too, so that a role still has its uids when it was moved to another cluster.
create table outbox.uid (
    uid uuid primary key,
    id bigint,
    created_at timestamptz not null default clock_timestamp(),
    emitter text,
    emitter_oid oid
);
comment on table outbox.uid is
    'The uids that an emitter chose: a second emit with one returns it and emits nothing.';
comment on column outbox.uid.id is
    'The id of the event.';
comment on column outbox.uid.emitter_oid is
    'The role that used the uid, whatever it is renamed to in this cluster.';

-- The unique keys of events that are not done yet: the event of a key is done once each sink that was registered when it was
-- emitted, and whose patterns match it, has delivered or discarded it, or has it as a dead letter. A relay then deletes the key.
--
-- A row without a uid was made to lock its key, and belongs to no event yet.
create table outbox.unique_key (
    type text collate "C" not null,
    unique_key text collate "C" not null,
    uid uuid,
    emitter text not null,
    emitter_oid oid,
    claimed_at timestamptz not null default clock_timestamp(),
    look_at timestamptz not null default clock_timestamp(),
    primary key (type, unique_key)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
comment on table outbox.unique_key is
    'Unique keys whose event is not done yet: see the parameter unique_key of outbox.emit.';
comment on column outbox.unique_key.look_at is
    'When a relay next looks whether the event is done.';
create index unique_key_look_at on outbox.unique_key (look_at);
create index unique_key_uid on outbox.unique_key (uid);

-- Scheduled events, one row each whatever the sinks are. A relay moves a row into the log when it is due. `id` is the order in
-- which they were emitted, and not the id that the log gives them.
create table outbox.scheduled (
    xid xid8 not null default pg_current_xact_id(),
    id bigint not null default nextval('outbox.event_id_seq'),
    created_at timestamptz not null default clock_timestamp(),
    uid uuid primary key,
    emitter text not null,
    emitter_oid oid,
    priority smallint,
    deliver_at timestamptz not null,
    type text collate "C" not null,
    key text collate "C",
    tenant text collate "C",
    content_type text,
    headers jsonb,
    payload bytea
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
comment on table outbox.scheduled is
    'Scheduled events that have not entered the log yet.';
comment on column outbox.scheduled.xid is
    'The transaction that emitted the event, for outbox.emitted.';
-- No statistics are kept of what erase removes.
alter table outbox.scheduled alter key set statistics 0, alter payload set statistics 0, alter headers set statistics 0;
create index scheduled_due on outbox.scheduled (deliver_at, id);

-- An event as the reading functions return it: see outbox_internal.readable. `bytes_before` is the size of those that the read
-- returned before it.
create type outbox_internal.read_event as (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text, tenant text, bytes_before bigint
);
