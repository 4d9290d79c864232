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
    home bigint,
    probes bigint not null default 0,
    claim text not null default 'log' check (claim in ('log', 'rows')),
    rate_per_second double precision check ((rate_per_second >= (0.01)) and (rate_per_second <= (100000))),
    max_in_flight_total integer check ((max_in_flight_total >= 1) and (max_in_flight_total <= 100000)),
    spread_seconds double precision check ((spread_seconds > (0)) and (spread_seconds <= (86400))),
    ledger_start bigint not null default 0
);
comment on table outbox.sink is
    'The sinks: which types each gets, whether it is paused, and its circuit.';
comment on column outbox.sink.last_error_mended_at is
    'When a relay found the last error to be over; older than last_error_at if an error came since.';
comment on column outbox.sink.home is
    'The cluster that the positions of this sink belong to: see outbox_internal.elsewhere. Null where the server does not tell it.';
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

-- A relay that still has the name of a removed sink in its file does not register it again.
create table outbox.former_sink (
    name text collate "C" primary key,
    removed_at timestamptz not null default clock_timestamp(),
    role_name text not null default coalesce(nullif(current_setting('role'), 'none'), session_user::text),
    actor text
);
comment on table outbox.former_sink is
    'Names of sinks that were removed.';

-- The routes of each sink and where its shards stood when they began: a row for each registration that changed them (`start`,
-- `routes`) and each `rebase`, and two for a seek (`end`, where the shards stood before, and `seek`). By it `why` judges events
-- that were read before.
create table outbox.sink_route (
    sink text collate "C" not null,
    seq bigint generated always as identity,
    kind text not null check (kind in ('start', 'routes', 'end', 'seek', 'rebase')),
    at timestamptz not null default clock_timestamp(),
    patterns text[] not null,
    a_seqs bigint[] not null,
    a_snapshots pg_snapshot[] not null,
    a_nexts bigint[] not null,
    b_snapshots pg_snapshot[] not null,
    last_ids bigint[] not null,
    newest_id bigint not null,
    upto_id bigint,
    primary key (sink, seq)
);
comment on table outbox.sink_route is
    'The routes that each sink has had, and where its shards stood at each change, for `why`.';
comment on column outbox.sink_route.a_seqs is
    'Of the positions of shards 0 to 63, as the four arrays that follow.';
comment on column outbox.sink_route.newest_id is
    'The newest id that was given out at the change.';
comment on column outbox.sink_route.upto_id is
    'Relays may have delivered up to this id under the routes before, from where the shards stood; null: not known yet.';

-- A relay owns its shards for as long as this lasts. A renewal writes one row, in its page, as no index has the end.
create table outbox.session (
    sink text collate "C" not null,
    owner uuid not null,
    lease_until timestamptz not null,
    primary key (sink, owner)
) with (fillfactor = 50);
comment on table outbox.session is
    'The lease of each relay on each sink and replay that it serves.';

-- Written on claim and release only: see outbox.owned.
create table outbox.shard (
    sink text collate "C" not null,
    shard smallint not null check ((shard >= 0) and (shard <= 63)),
    owner uuid,
    epoch bigint not null default 0,
    released_at timestamptz not null default clock_timestamp(),
    crashes integer not null default 0,
    generation bigint,
    primary key (sink, shard)
) with (fillfactor = 50);
comment on table outbox.shard is
    'The shards of each sink: which relay delivers the events of which keys while its session lasts.';
comment on column outbox.shard.released_at is
    'When the last owner released the shard. It says nothing while there is an owner.';
comment on column outbox.shard.generation is
    'The generation under which the owner claimed the shard; null if that is not known.';

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
comment on table outbox.progress is
    'The ledger of positions: how far each sink has settled the log. A later row outranks an earlier one.';
