-- Recorded attempts: when which relay delivered an event to a sink, or failed to. Relays made for version 2 work on this
-- schema, and record nothing.

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
comment on column outbox.attempt.outcome is
    'delivered; failed, and tried again later; refused by the destination for good; dead: failed for the last time.';
comment on column outbox.attempt.detail is
    'What else is known: code, steps and answer of a failed request; topic, partition and offset of a Kafka record.';

create index attempt_uid on outbox.attempt (uid);

-- A missing partition must never fail a settlement. Its rows are removed one by one, so they are found by their time.
create table outbox.attempt_default partition of outbox.attempt default;
create index attempt_default_at on outbox.attempt_default (at);

-- Record attempts, each with its age in seconds, as part of the statement that settles them. A statement without attempts
-- does not call it, and then neither plans an insert nor locks the table: it works while no attempt can be recorded. The
-- attempts of a replay are those of the sink to which it delivers, marked with its number.
create function outbox.record_attempts(
    sink text, relay text, ids bigint[], uids uuid[], numbers integer[], outcomes text[], ages double precision[],
    milliseconds double precision[], statuses integer[], errors text[], details text[]
) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    recorded bigint;
begin
    insert into outbox.attempt (at, uid, sink, id, number, relay, outcome, status, milliseconds, error, detail)
    select clock_timestamp() - r.age * interval '1 second', r.uid, outbox.sink_of(record_attempts.sink), r.id, r.number,
           record_attempts.relay, r.outcome, r.status, r.took, r.error,
           outbox.attempt_detail(record_attempts.sink, r.detail::jsonb)
      from unnest(ids, uids, numbers, outcomes, ages, record_attempts.milliseconds, statuses, errors, details)
           r (id, uid, number, outcome, age, took, status, error, detail);
    get diagnostics recorded = row_count;
    return recorded;
end
$$;

-- True if the caller's role may see payloads.
create function outbox.sees_payloads() returns boolean
language sql stable
return has_column_privilege(outbox.emitter(), 'outbox.delivery', 'payload', 'SELECT');

-- The details of an attempt, without the destination's answer for roles that may not see payloads: an answer may repeat
-- what was sent.
create function outbox.shown_detail(detail jsonb) returns jsonb
language sql stable
return case when detail ? 'answer' and not outbox.sees_payloads() then detail - 'answer' else detail end;

-- The recorded attempts of an event.
create function outbox.attempts_of(event_uid uuid) returns table (
    at timestamptz, sink text, number integer, relay text, outcome text, status integer, milliseconds double precision,
    error text, detail jsonb
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select a.at, a.sink, a.number, a.relay, a.outcome, a.status, a.milliseconds, a.error, outbox.shown_detail(a.detail)
      from outbox.attempt a
     where a.uid = event_uid
$$;

-- The details of the last attempt of a delivery.
create function outbox.last_attempt_of(sink_name text, event_id bigint) returns jsonb
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select outbox.shown_detail(d.last_attempt) from outbox.delivery d where d.sink = sink_name and d.id = event_id
$$;

-- One session at a time makes or drops partitions of attempts.
insert into outbox.chore (name) values ('attempts');

-- Make the daily partitions (UTC) of attempts that are missing from today to `days_ahead` days ahead, and return how
-- many: as outbox.make_partitions does for the log, with the same care.
create function outbox.make_attempt_partitions(days_ahead integer default 3) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set default_tablespace = ''
set default_table_access_method = 'heap'
as $$
declare
    today constant timestamp := date_trunc('day', clock_timestamp() at time zone 'UTC');
    newest timestamptz;
    day timestamp;
    part text;
    role text;
    made integer := 0;
begin
    perform from outbox.chore c where c.name = 'attempts' for update skip locked;
    if not found then
        return 0;
    end if;
    for day in
        select today + n * interval '1 day' from generate_series(0, least(greatest(coalesce(days_ahead, 3), 1), 30)) n
    loop
        part := 'attempt_' || to_char(day, 'YYYYMMDD');
        continue when to_regclass('outbox.' || part) is not null;
        select max(d.at) into newest from outbox.attempt_default d;
        continue when newest >= day at time zone 'UTC';
        execute format('create table outbox.%I (like outbox.attempt including defaults)', part);
        perform outbox.keep_no_statistics(to_regclass('outbox.' || part), '{error, detail}');
        for role in
            select distinct case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
              from pg_class c cross join lateral aclexplode(c.relacl) a
             where c.oid = ('outbox.' || part)::regclass and a.grantee <> c.relowner
        loop
            execute format('revoke all on table outbox.%I from %s cascade', part, role);
        end loop;
        execute format('alter table outbox.attempt attach partition outbox.%I for values from (%L) to (%L)',
                       part, day at time zone 'UTC', (day + interval '1 day') at time zone 'UTC');
        made := made + 1;
    end loop;
    return made;
end
$$;

select outbox.make_attempt_partitions();
