-- Days of 0 mean no limit. Only functions write here, so no relay decides alone.
create table outbox.retention (
    single boolean primary key default true check (single),
    stated boolean not null default false,
    keep_days integer not null default 30,
    keep_uids_days integer not null default 30,
    keep_dead_days integer not null default 0,
    keep_attempts_days integer not null default 14,
    archive boolean not null default false,
    lower_since timestamptz,
    lower_asked jsonb,
    clock_mark timestamptz,
    worked_at timestamptz,
    hold_until timestamptz,
    epoch bigint not null default 0,
    lease bigint,
    owner uuid,
    actor text,
    lease_until timestamptz,
    uid_cursor uuid,
    uid_lap_at timestamptz,
    dead_cursor_sink text collate "C",
    dead_cursor_id bigint,
    dead_audit bigint,
    reason text,
    inbox_cursor timestamptz,
    inbox_lap_at timestamptz
);
comment on table outbox.retention is
    'One row: the retention policy, and the relay that carries it out.';
insert into outbox.retention default values;
comment on column outbox.retention.lower_since is
    'Since when the files of all live relays have asked for less than keep_days: it is lowered a day later.';
comment on column outbox.retention.lower_asked is
    'The values that they ask for by now. Whenever one becomes less, lower_since begins again.';
comment on column outbox.retention.clock_mark is
    'The clock of the newest pass; a larger step than a day is a jump.';
comment on column outbox.retention.worked_at is
    'When the newest pass began that does its steps; -infinity: none yet, only passes of relays with enabled = false.';
comment on column outbox.retention.hold_until is
    'Nothing is emptied until then, because the clock has jumped.';
comment on column outbox.retention.lease is
    'The number that each step of the newest pass names. It is random: no other process can guess it.';
comment on column outbox.retention.dead_cursor_id is
    'The last dead row that was looked at, with its sink; null: the next one is the first. `dead_audit` counts since then.';
comment on column outbox.retention.reason is
    'Why a person began the newest pass, for the audit; null for a relay.';
comment on column outbox.retention.inbox_cursor is
    'The time of the last mark that was looked at; null: the next one is the first, an hour after inbox_lap_at.';

-- The known facts of each day. A day that was emptied may get events again, when a clock steps back: then it gets
-- another part. The part that is not emptied yet has the newest check, and the archive that was verified. `day` is the
-- first day of a partition; -infinity means the DEFAULT partition.
create table outbox.day (
    day date not null,
    part integer not null default 1,
    events bigint,
    bytes bigint,
    archived_to text,
    sha256 text,
    emptied_at timestamptz,
    kept_by jsonb not null default '[]',
    left_because text,
    left_at timestamptz,
    checked_snapshot pg_snapshot,
    checked_config bigint,
    checked_before timestamptz,
    checked_on text,
    deleted_at timestamptz,
    deleted_id bigint,
    archived_snapshot pg_snapshot,
    archived_before timestamptz,
    archived_on text,
    writing_to text,
    unfinished text[] not null default '{}',
    primary key (day, part)
);
comment on table outbox.day is
    'The known facts of each day of the log: checked, archived, emptied.';
comment on column outbox.day.left_because is
    'Why the newest pass that tried to empty the day, which nothing kept, left it: the archive failed, or a lock was not granted.';
comment on column outbox.day.checked_before is
    'Of the DEFAULT partition, only events from before this time were checked.';
comment on column outbox.day.deleted_at is
    'Time and id of the last event that was deleted from the DEFAULT partition since the check: the next step begins there.';
comment on column outbox.day.archived_snapshot is
    'The archive holds every event that this snapshot shows. A change of events that are in it must clear this column.';
comment on column outbox.day.writing_to is
    'An archive that was begun and is not verified.';
comment on column outbox.day.unfinished is
    'The newest archives that were given up, or do not have every event any more. Their objects can be removed.';
create unique index day_current on outbox.day (day) where (emptied_at is null);

-- An erasure that is under way, without the key or uid itself. All events of its subject are looked at before the first
-- is changed: in ids (place, upto_id], first in phase "looking", then again in phase "erasing".
--
-- What was looked at is what `snapshot` shows. It stays delivered while `config` is the same on the same server: every
-- action that puts positions back raises that counter, and all else moves them forward. Otherwise all is looked at again.
create table outbox.erasure (
    id bigint generated always as identity primary key,
    subject jsonb not null,
    role_name text not null default coalesce(nullif(current_setting('role'), 'none'), session_user::text),
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
comment on table outbox.erasure is
    'Erasures that are under way.';
