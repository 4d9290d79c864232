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

-- Remove recorded attempts that are older than keep_attempts_days, a step at a time: the oldest partition that ended before
-- then, or up to 1,000 rows of the DEFAULT partition. `removed` counts partitions or rows; 0 means that none is left.
--
-- Dropping a partition waits for settlements that have written attempts, each a short transaction, and later ones wait
-- behind it: for 50 ms at most, after which it fails and is tried again later.
create or replace function outbox_internal.trim_attempts(lease bigint) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
#variable_conflict use_variable
declare
    t outbox.retention;
    keep_from timestamptz;
    part regclass;
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
    select p.part into part
      from outbox_internal.partitions('outbox.attempt') p where p.day <> '-infinity' and p.upto <= keep_from order by p.day limit 1;
    if part is not null then
        execute format('drop table %s', part);
        return 1;
    end if;
    delete from outbox.attempt_default d
     where d.ctid = any (array(select o.ctid from outbox.attempt_default o where o.at < keep_from order by o.at limit 1000));
    get diagnostics removed = row_count;
    return removed;
end
$$;
