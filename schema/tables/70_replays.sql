-- The position of the target at the start is kept in arrays of 64, by shard: an event that it had not passed then is not the
-- replay's. `floor` is the one that they belong to: after a rebase outbox_internal.tend_replay takes the target's position as
-- it then is. `failed` counts the dead letters that were given to the target, `dropped` the rows of a cancelled replay that
-- were not delivered. `seen` is the sum of the ledger once that is deleted. Of rows only those count that the position of their
-- shard has passed: the others are not in `seen` either, since they are read again after a crash.
create table outbox.replay (
    id bigint generated always as identity primary key,
    sink text collate "C" not null,
    target text collate "C" not null,
    target_gone boolean not null default false,
    redirected boolean not null,
    state text not null default 'running' check (state in ('running', 'paused', 'done', 'cancelled')),
    type_pattern text collate "C",
    type_like text collate "C",
    routed text[],
    key text collate "C",
    since timestamptz,
    until timestamptz,
    uids uuid[],
    ids bigint[],
    from_id bigint not null,
    upto_id bigint not null,
    floor bigint not null,
    a_seqs bigint[] not null,
    a_snapshots pg_snapshot[] not null,
    a_nexts bigint[] not null,
    b_snapshots pg_snapshot[] not null,
    last_ids bigint[] not null,
    counted_upto bigint not null,
    counted bigint not null default 0,
    failed bigint not null default 0,
    dropped bigint not null default 0,
    seen bigint not null default 0,
    cleared boolean not null default false,
    rate integer check (rate > 0),
    created_at timestamptz not null default clock_timestamp(),
    ended_at timestamptz,
    role_name text not null default coalesce(nullif(current_setting('role'), 'none'), session_user::text),
    actor text,
    reason text,
    passed_by bigint,
    end_ids bigint[],
    unknown_upto bigint[],
    tenant text collate "C",
    tokens double precision not null default 0,
    tokens_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);
comment on table outbox.replay is
    'The replays of events of the log to one sink.';
comment on column outbox.replay.target_gone is
    'The target was removed: its name may be that of another sink by now, which gets no dead letter.';
comment on column outbox.replay.cleared is
    'Its shards, positions and rows are deleted, and its counts are final.';
comment on column outbox.replay.passed_by is
    'The number of events that were passed by, of a cleared replay.';
comment on column outbox.replay.end_ids is
    'The last id of each shard that was settled, by shard, of a cleared replay.';
comment on column outbox.replay.unknown_upto is
    'The last id of each shard that was settled when a rebase was adopted. Up to there it meant other events.';
comment on column outbox.replay.tokens is
    'Events that all relays together may read at tokens_at, of a replay with a rate: `rate` more each second.';
comment on column outbox.replay.tenant is
    'Only events of this tenant are meant; null: those of all.';
-- No statistics are kept of what erase removes.
alter table outbox.replay alter key set statistics 0, alter reason set statistics 0;
create index replay_uncleared on outbox.replay (id) where (not cleared);

-- Positions, appended only behind the fence of outbox_internal.settle_replayed: of a shard the highest counts. `seen` is the
-- number of events that were settled since the row before, delivered or made rows.
create table outbox.replay_progress (
    replay bigint not null references outbox.replay(id) on delete cascade,
    seq bigint generated always as identity,
    shards smallint[] not null,
    last_ids bigint[] not null,
    seen bigint not null,
    passed_by bigint not null default 0,
    primary key (replay, seq)
);
comment on table outbox.replay_progress is
    'The ledger of positions of the replays.';
comment on column outbox.replay_progress.passed_by is
    'The number of events that were passed by since the row before.';

-- The events that a replay means and did not deliver, for as long as the log has them: passed by with a reason, failed (a
-- dead letter that was given to the target), or dropped (a row of a cancelled replay). Each is written in the transaction
-- that moves the position past the event, moves its row, or deletes that.
create table outbox.replay_exception (
    replay bigint not null references outbox.replay(id) on delete cascade,
    id bigint not null,
    outcome text not null check (outcome in ('passed by', 'failed', 'dropped')),
    reason text check (reason in ('row', 'discarded')),
    primary key (id, replay)
);
comment on table outbox.replay_exception is
    'Events that a replay means and did not deliver, with the reason.';
