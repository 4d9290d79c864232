-- Record attempts, and return their number. The sink is looked up once, and not for each attempt: that was half of the cost
-- of settling a row that was retried.
create or replace function outbox_internal.record_attempts(
    sink text, relay text, ids bigint[], uids uuid[], numbers integer[], outcomes text[], ages double precision[],
    milliseconds double precision[], statuses integer[], errors text[], details text[]
) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    target constant text := outbox_internal.sink_of(record_attempts.sink);
    replay constant bigint := outbox_internal.replay_of(record_attempts.sink);
    recorded bigint;
begin
    insert into outbox.attempt (at, uid, sink, id, number, relay, outcome, status, milliseconds, error, detail)
    select clock_timestamp() - r.age * interval '1 second', r.uid, target, r.id, r.number,
           record_attempts.relay, r.outcome, r.status, r.took, r.error,
           case when replay is null then r.detail::jsonb
                else coalesce(r.detail::jsonb, '{}') || jsonb_build_object('replay', replay) end
      from unnest(ids, uids, numbers, outcomes, ages, record_attempts.milliseconds, statuses, errors, details)
           r (id, uid, number, outcome, age, took, status, error, detail);
    get diagnostics recorded = row_count;
    return recorded;
end
$$;

-- The recorded attempts of an event.
create or replace function outbox.attempts_of(event_uid uuid) returns table (
    at timestamptz, sink text, number integer, relay text, outcome text, status integer, milliseconds double precision,
    error text, detail jsonb
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select a.at, a.sink, a.number, a.relay, a.outcome, a.status, a.milliseconds, a.error, outbox_internal.shown_detail(a.detail)
      from outbox.attempt a
     where a.uid = event_uid
$$;
comment on function outbox.attempts_of is
    'The recorded attempts to deliver an event.';

-- The details of the last attempt of a delivery.
create or replace function outbox_internal.last_attempt_of(sink_name text, event_id bigint) returns jsonb
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select outbox_internal.shown_detail(d.last_attempt) from outbox.delivery d where d.sink = sink_name and d.id = event_id
$$;

-- Make the partitions of attempts for today and the days ahead, and return their number: see outbox_internal.make_partitions.
create or replace function outbox_internal.make_attempt_partitions(days_ahead integer default 3) returns integer
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
    day timestamp;
    part text;
    role text;
    made integer := 0;
begin
    -- One session at a time. Others do not wait, and statements on the rows are not held up.
    begin
        lock table only outbox.attempt in share update exclusive mode nowait;
    exception when lock_not_available then
        return 0;
    end;
    for day in
        select today + n * interval '1 day' from generate_series(0, least(greatest(coalesce(days_ahead, 3), 1), 30)) n
    loop
        part := 'attempt_' || to_char(day, 'YYYYMMDD');
        continue when to_regclass('outbox.' || part) is not null;
        continue when exists (
            select from outbox.attempt_default d
             where d.at >= day at time zone 'UTC' and d.at < (day + interval '1 day') at time zone 'UTC');
        execute format('create table outbox.%I (like outbox.attempt including defaults)', part);
        perform outbox_internal.keep_no_statistics(to_regclass('outbox.' || part), '{error, detail}');
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

-- Remove recorded attempts that are older than keep_attempts_days, a step at a time: the oldest partition that ended before
-- then, or up to 1,000 rows of the DEFAULT partition. `removed` counts partitions or rows; 0 means that none is left.
--
-- Dropping a partition waits for settlements that have written attempts, each a short transaction, and later ones wait
-- behind it: for 50 ms at most, after which it fails and is tried again later.
create or replace function outbox_internal.trim_attempts(lease bigint) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
as $$
declare
    t outbox.retention;
    keep_from timestamptz;
    part text;
    removed integer;
begin
    perform outbox_internal.renew_retention(lease);
    select * into t from outbox.retention;
    keep_from := clock_timestamp() - make_interval(days => t.keep_attempts_days);
    if t.keep_attempts_days = 0 or t.hold_until > clock_timestamp() then
        return 0;
    end if;
    -- One session at a time. Others do not wait, and statements on the rows are not held up.
    begin
        lock table only outbox.attempt in share update exclusive mode nowait;
    exception when lock_not_available then
        return 0;
    end;
    select c.relname into part
      from pg_inherits i join pg_class c on c.oid = i.inhrelid
     where i.inhparent = 'outbox.attempt'::regclass and c.relname ~ '^attempt_[0-9]{8}$'
       and to_date(right(c.relname, 8), 'YYYYMMDD') + 1 <= keep_from
     order by c.relname
     limit 1;
    if part is not null then
        execute format('drop table outbox.%I', part);
        return 1;
    end if;
    delete from outbox.attempt_default d
     where d.ctid = any (array(select o.ctid from outbox.attempt_default o where o.at < keep_from order by o.at limit 1000));
    get diagnostics removed = row_count;
    return removed;
end
$$;

