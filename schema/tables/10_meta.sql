-- The schema of the outbox: an append-only log of events, the sinks that read it, and the exceptions. `outbox` has the tables
-- and the functions that people and applications call, `outbox_internal` the functions that those and the relay call.
-- Events are never changed. A sink's progress is a position per shard in the ledger `progress`; only an event that needs
-- individual care becomes a row of `delivery`.

create schema outbox;
comment on schema outbox is 'Transactional outbox: events written with the business data, relayed to sinks.';
create schema outbox_internal;
comment on schema outbox_internal is 'Functions that outbox-relay and the functions of schema outbox call.';

-- The server has no mark until outbox_internal.arm() sets one. A restart after the crash of one process does not change the
-- postmaster's start. But it empties what is not logged, so the mark is gone. Statistics are reset by people too.
create unlogged sequence outbox.server_mark;
comment on sequence outbox.server_mark is
    'A mark of the running server, which a crash takes away.';

create table outbox.meta (
    single boolean primary key default true check (single),
    schema_version integer not null,
    min_relay integer not null,
    floor bigint not null default 0,
    floor_xid bigint not null default 3,
    config bigint not null default 1,
    system_identifier bigint,
    max_payload_bytes integer not null default 1048576 check (max_payload_bytes between 1024 and 67108864)
);
comment on table outbox.meta is
    'One row: the version of the schema, the numbering of the log, the counter of configurations and the payload ceiling.';
comment on column outbox.meta.min_relay is
    'The oldest schema version that a relay may have been made for and still work on this one.';
comment on column outbox.meta.floor is
    'Ids up to this one carry transaction numbers of another numbering: see outbox.rebase.';
comment on column outbox.meta.floor_xid is
    'The oldest transaction that ran at that rebase.';
comment on column outbox.meta.max_payload_bytes is
    'The payload ceiling: migrate --max-payload-bytes. The setting outbox.max_payload_bytes only lowers it.';
comment on column outbox.meta.config is
    'Counts changes of the configuration and of positions. It only rises, so no older tick can look like a newer one.';
comment on column outbox.meta.system_identifier is
    'The cluster whose transaction numbers the log carries: see outbox.rebase. Null where the server does not tell it.';

-- Roles and their kinds of grants by `migrate`; a later migration grants them again on what it replaces.
create table outbox.grantee (
    role_name name not null,
    kind text not null check (kind in ('emit', 'consume', 'relay', 'read', 'operate', 'payloads')),
    primary key (role_name, kind)
);
comment on table outbox.grantee is
    'Roles that migrate has granted the privileges of a kind: see outbox.privilege.';

-- Keys that the database makes once. A role sees those that it uses.
create table outbox.secret (
    single boolean primary key default true check (single),
    hash_key bytea not null default decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'),
    config_key bytea not null default decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex')
);
insert into outbox.secret default values;
comment on table outbox.secret is
    'The keys of keyed hashes. Who does not know one cannot find out by trial what was meant.';
comment on column outbox.secret.hash_key is
    'Of keys and uids of events in the audit and in manifests of archives.';
comment on column outbox.secret.config_key is
    'Of secret settings that relays record.';
