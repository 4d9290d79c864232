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
    created_at timestamptz not null default clock_timestamp(),
    last_error_mended_at timestamptz,
    named_at timestamptz,
    home bigint,
    probes bigint not null default 0,
    claim text not null default 'log' check (claim in ('log', 'rows')),
    rate_per_second double precision check ((rate_per_second >= (0.01)) and (rate_per_second <= (100000))),
    max_in_flight_total integer check ((max_in_flight_total >= 1) and (max_in_flight_total <= 100000)),
    spread_seconds double precision check ((spread_seconds > (0)) and (spread_seconds <= (86400))),
    ledger_start bigint not null default 0
);
comment on column outbox.sink.last_error_mended_at is
    'When a relay found the last error to be over; older than last_error_at if an error came since.';
comment on column outbox.sink.named_at is
    'When another sink had this name for the last time: attempts that were recorded before are of that one. Null: none had it.';
comment on column outbox.sink.home is
    'The identifier of the cluster that the positions of this sink belong to.';
comment on column outbox.sink.probes is
    'Number of requests by people to probe the destination now. Relays compare it once a second.';
comment on column outbox.sink.claim is
    'rows: each event becomes a row of outbox.delivery, claimed by its priority.';
comment on column outbox.sink.rate_per_second is
    'Events per second of all relays together; null: no limit.';
comment on column outbox.sink.max_in_flight_total is
    'Requests in flight of all relays together; null: no limit.';
comment on column outbox.sink.spread_seconds is
    'Time over which scheduled events of one moment are spread; null: none.';
comment on column outbox.sink.ledger_start is
    'The positions of this sink with a smaller seq are gone. Readers of the ledger begin here, behind their dead versions.';
-- No statistics are kept of what erase removes.
alter table outbox.sink alter paused_reason set statistics 0, alter last_error set statistics 0;

-- A sink that was removed is not registered again by a relay that still has it in its file. A sink that was renamed is
-- served under its new name: `renamed_to` is always a sink that exists, never another former name. A sink of a name wins
-- over a former one.
create table outbox.former_sink (
    name text collate "C" primary key,
    removed_at timestamptz not null default clock_timestamp(),
    role_name text not null default coalesce(nullif(current_setting('role'), 'none'), session_user::text),
    actor text,
    renamed_to text collate "C",
    named_at timestamptz,
    check ((renamed_to <> name))
);
comment on column outbox.former_sink.named_at is
    'As in outbox.sink, of the sink to which the name leads.';
create index former_sink_renamed_to on outbox.former_sink (renamed_to);

-- The time at which a name was last that of a sink.
create table outbox.name_end (
    name text collate "C" primary key,
    at timestamptz not null default clock_timestamp()
);

-- The patterns of each generation of a sink, for as long as a pass refers to it.
create table outbox.sink_patterns (
    sink text collate "C" not null,
    generation bigint not null,
    patterns text[] not null,
    primary key (sink, generation)
);

-- A pass of a shard: from a position on, its owners read the log under the patterns of one generation. It goes up to where
-- it was ended, else to where the next pass of the shard begins, else to the shard's position. `epoch` is that of the
-- shard at its beginning; `begun_seq` and `end_seq` name the rows of the ledger from which the two positions come. A
-- `known` pass is empty: it has the position of a shard before its sink was put at another place.
create table outbox.sink_pass (
    sink text collate "C" not null,
    shard smallint not null,
    seq bigint generated always as identity,
    generation bigint not null,
    epoch bigint not null,
    kind text not null check (kind in ('start', 'claim', 'seek', 'known')),
    begun_at timestamptz not null default clock_timestamp(),
    begun_seq bigint not null,
    a_seq bigint not null,
    a_snapshot pg_snapshot not null,
    a_next bigint not null,
    b_seq bigint,
    b_snapshot pg_snapshot,
    b_next bigint,
    last_id bigint not null,
    ended_at timestamptz,
    end_seq bigint,
    end_a_seq bigint,
    end_a_snapshot pg_snapshot,
    end_a_next bigint,
    end_b_seq bigint,
    end_b_snapshot pg_snapshot,
    end_last_id bigint,
    more_rows boolean not null default false,
    primary key (sink, shard, seq)
);
comment on column outbox.sink_pass.more_rows is
    'Not every row after the end was examined for outbox.row_ahead: the sink may have delivered more events there.';

-- Written on claim, renewal and release only. `lease_until` of a shard without an owner is when it was released.
create table outbox.shard (
    sink text collate "C" not null,
    shard smallint not null check ((shard >= 0) and (shard <= 63)),
    owner uuid,
    epoch bigint not null default 0,
    lease_until timestamptz not null default clock_timestamp(),
    crashes integer not null default 0,
    generation bigint,
    primary key (sink, shard)
) with (fillfactor = 50);
comment on column outbox.shard.generation is
    'The generation under which the owner claimed the shard; null if that is not known.';
-- All versions of a row but its last few have an older `lease_until`, so a condition on it leaves them out. Of an expression, by
-- which statements also join and sort: the primary key, which is smaller, is no choice for any plan then.
create index shard_lease on outbox.shard (((sink || '')), lease_until);

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

-- Positions that owners wrote after their pass had ended, as after a seek that they had not noticed. They do not count for
-- those who read on, but what they say is true: up to there the events were delivered. Filled when the ledger is trimmed.
-- One owner writes at an epoch, and its last position has passed everything that its earlier ones have.
create table outbox.late_position (
    sink text collate "C" not null,
    shard smallint not null,
    epoch bigint not null,
    seq bigint not null,
    a_seq bigint not null,
    a_snapshot pg_snapshot not null,
    a_next bigint not null,
    b_seq bigint,
    b_snapshot pg_snapshot,
    last_id bigint not null,
    primary key (sink, shard, epoch)
);
