create sequence outbox.schedule_generation cache 1;
comment on sequence outbox.schedule_generation is
    'Numbers the definitions of schedules, so that an older one is told from a newer.';

-- A schedule, as the relay that registered it last has it in its file. A relay fires every schedule of this table, whatever
-- its own file says, so the times do not depend on which relay is alive.
create table outbox.schedule (
    name text collate "C" primary key,
    cron text not null,
    timezone text not null,
    type text not null,
    payload jsonb not null,
    headers jsonb,
    key text,
    missed text not null check (missed in ('one', 'skip', 'all')),
    generation bigint not null default nextval('outbox.schedule_generation'),
    after_at timestamptz not null default clock_timestamp(),
    next_at timestamptz,
    last_at timestamptz,
    paused boolean not null default false,
    retry_at timestamptz,
    error text,
    error_at timestamptz,
    tenant text collate "C",
    check ((next_at > after_at))
);
comment on table outbox.schedule is
    'Schedules from the files of the relays. Change the file, or call outbox.set_schedule.';
comment on column outbox.schedule.generation is
    'A number that is new after each change of the definition.';
comment on column outbox.schedule.after_at is
    'No time up to this one is emitted, or will be.';
comment on column outbox.schedule.next_at is
    'The next time; null: a relay has yet to find the first one after after_at.';
comment on column outbox.schedule.last_at is
    'The newest time that was emitted.';
comment on column outbox.schedule.retry_at is
    'The schema refused the event at next_at: it is tried again at this time.';
comment on column outbox.schedule.error is
    'Why the event at next_at was not emitted: the schema refused it if retry_at is set, and otherwise a relay says why.';
alter sequence outbox.schedule_generation owned by outbox.schedule.generation;
