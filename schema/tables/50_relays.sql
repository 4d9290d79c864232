-- One row per live relay process: membership and status.
create table outbox.relay (
    id uuid primary key,
    name text not null,
    version text not null,
    sinks text[] not null,
    started_at timestamptz not null default clock_timestamp(),
    seen_at timestamptz not null default clock_timestamp(),
    config jsonb,
    retention jsonb,
    schedules jsonb,
    -- What is kept is never less than a file can say.
    check (retention is null or (retention @@ '
        $.keep_days >= 0 && $.keep_days <= 36500 && $.keep_days == $.keep_days.floor()
        && $.keep_uids_days >= 0 && $.keep_uids_days <= 36500 && $.keep_uids_days == $.keep_uids_days.floor()
        && $.keep_dead_days >= 0 && $.keep_dead_days <= 36500 && $.keep_dead_days == $.keep_dead_days.floor()
        && $.keep_attempts_days >= 0 && $.keep_attempts_days <= 36500 && $.keep_attempts_days == $.keep_attempts_days.floor()
        && ($.archive == true || $.archive == false)') is true)
) with (fillfactor = 50);
comment on table outbox.relay is
    'The relays that run, and the configuration that each has.';
comment on column outbox.relay.schedules is
    'Schedules of the relay''s file by name, with the generation that it knows of each.';

-- One row. `token` belongs to the newest claim: no other process can guess it. Only functions write here.
create table outbox.figures (
    single boolean primary key default true check (single),
    owner uuid,
    token uuid,
    lease_until timestamptz not null default '-infinity',
    at timestamptz,
    figures jsonb
) with (fillfactor = 50);
comment on table outbox.figures is
    'The latest figures of the sinks, which one relay collects for all.';
insert into outbox.figures default values;

-- The work of relays in each minute of the database's clock: counts of all relays, and the greatest of their percentiles, in
-- seconds. The sink '' is the process itself. `busy_ms` is the time that statements of the data path took together.
create table outbox.history (
    sink text collate "C" not null,
    at timestamptz not null,
    delivered bigint not null default 0,
    failed bigint not null default 0,
    dead bigint not null default 0,
    backlog bigint,
    oldest_seconds double precision,
    end_to_end_p50 double precision,
    end_to_end_p99 double precision,
    claim_p99 double precision,
    tick_p99 double precision,
    settle_p99 double precision,
    busy_ms double precision,
    primary key (sink, at)
) with (fillfactor = 70);
comment on table outbox.history is
    'The work of relays in each minute: counts of all relays, and the greatest of their percentiles.';
create index history_at on outbox.history (at);

-- The time of the last notice of each type and cause: at most one is made in an hour. Of the notices that a sink is paused
-- or lags, and that it has recovered, the newer one is the last that was made of it. `sink` is '' if a cause has no sink.
create table outbox.notice (
    type text collate "C" not null,
    sink text collate "C" not null,
    cause text collate "C" not null,
    at timestamptz not null default clock_timestamp(),
    primary key (type, sink, cause)
);
comment on table outbox.notice is
    'The time of the last notice of each type and cause: at most one is emitted in an hour.';

-- `role_name` is the session's, or the one that it took with SET ROLE, and `login` is the session's in any case: no caller
-- can choose them. `actor` is what the caller says who it is. An action on many rows, in many transactions, is one row,
-- whose count rises with each of them.
create table outbox.audit (
    id bigint generated always as identity primary key,
    at timestamptz not null default clock_timestamp(),
    role_name text not null default coalesce(nullif(current_setting('role'), 'none'), session_user::text),
    login text not null default session_user,
    actor text,
    action text not null,
    sink text collate "C",
    filter jsonb,
    count bigint not null default 0,
    reason text
);
comment on table outbox.audit is
    'Every action of an operator: who, when, what, why.';
-- No statistics are kept of what erase removes.
alter table outbox.audit alter filter set statistics 0, alter reason set statistics 0;
create index audit_at on outbox.audit (at);
