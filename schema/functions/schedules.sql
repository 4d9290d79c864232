-- Emit the `times` of a schedule (null: the one that it was `seen` to have next), move it to `next`, and return the outcome
-- (emitted, passed over, superseded, early, again, refused) and the number of events. A transaction emits at most 8 MiB,
-- and for two seconds, but at least one event: then the next time is the first one that it did not come to. The reason of a
-- refusal is recorded only if its text is of this schema: that of a trigger may quote the payload.
create or replace function outbox_internal.fire_schedule_times(
    name text, seen timestamptz, next timestamptz, generation bigint, times timestamptz[] default null
) returns table (outcome text, emitted integer)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    most_bytes constant bigint := 8 << 20;
    most_time constant interval := '2 seconds';
    s outbox.schedule;
    fired timestamptz[] := coalesce(times, array[seen]);
    following timestamptz := next;
    last timestamptz;
    at timestamptz;
    now_at timestamptz;
    horizon timestamptz;
    event_bytes bigint;
    refusal text;
begin
    emitted := 0;
    if next is null or next <= seen or cardinality(fired) > 1000
       or exists (select from unnest(fired) f (at) where f.at is null or f.at < seen or f.at >= next)
       or fired <> array(select distinct f.at from unnest(fired) f (at) order by f.at) then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'times must be at most 1000, in order, from seen on, and before next';
    end if;
    select c.* into s from outbox.schedule c
     where c.name = fire_schedule_times.name and c.generation = fire_schedule_times.generation and c.next_at = seen
       and not c.paused
       for update skip locked;
    if not found then
        outcome := 'superseded';
        return next;
        return;
    end if;
    now_at := clock_timestamp();
    horizon := now_at - interval '1 minute';
    outcome := case
        when seen > now_at or fired[cardinality(fired)] > now_at then 'early'
        when s.missed = 'all' then case when fired[1] is distinct from seen then 'again' end
        when seen >= horizon then case when fired is distinct from array[seen] then 'again' end
        when next < horizon then 'again'
    end;
    if outcome is not null then
        return next;
        return;
    end if;
    if s.missed <> 'all' and seen < horizon then
        fired := case s.missed when 'one' then array[coalesce(fired[cardinality(fired)], seen)] else '{}' end;
    end if;
    event_bytes := octet_length(s.payload::text) + coalesce(octet_length(s.headers::text), 0) + 1;
    begin
        foreach at in array fired loop
            if emitted > 0 and ((emitted + 1) * event_bytes > most_bytes or clock_timestamp() > now_at + most_time) then
                following := at;
                exit;
            end if;
            perform outbox_internal.emit_schedule(s, at);
            emitted := emitted + 1;
            last := at;
        end loop;
    exception
        when others then
            -- Errors that pass by themselves are the relay's: it records them, and tries again soon.
            if sqlstate ~ '^(08|25|40|53|55|57|58|XX)' then
                raise;
            end if;
            refusal := case when sqlstate = '22023' and starts_with(sqlerrm, 'outbox.emit: ')
                            then outbox_internal.short_text(sqlerrm, 2000)
                            else format('the database refused the event (%s)', sqlstate) end;
    end;
    if refusal is not null then
        update outbox.schedule c
           set retry_at = now_at + interval '1 minute', error = refusal, error_at = now_at
         where c.name = s.name;
        outcome := 'refused';
        emitted := 0;
        return next;
        return;
    end if;
    update outbox.schedule c
       set after_at = greatest(s.after_at, seen, last), next_at = following, last_at = coalesce(last, s.last_at),
           retry_at = null, error = null, error_at = null
     where c.name = s.name;
    outcome := case when emitted = 0 then 'passed over' else 'emitted' end;
    return next;
end
$$;

-- Emit the event of a schedule now, and return its uid. The header has the present time, and the times stay as they are.
create or replace function outbox.run_schedule(schedule_name text, actor text, reason text) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    s outbox.schedule;
    uid uuid;
begin
    perform outbox_internal.require_schedule(schedule_name);
    select c.* into s from outbox.schedule c where c.name = schedule_name;
    uid := outbox_internal.emit_schedule(s, clock_timestamp());
    perform outbox_internal.record_action('schedule run', null, jsonb_build_object('schedule', schedule_name, 'uid', uid), 1, actor, reason);
    return uid;
end
$$;
comment on function outbox.run_schedule is
    'Emit the event of a schedule now, and return its uid. The times of the schedule stay as they are. Recorded in '
    'outbox.audit.';

-- Pause, resume or remove a schedule. False: it was in this state already. Times that pass while it is paused are not missed:
-- a resumed schedule begins with the first time after now. A relay that has a removed schedule in its file registers it
-- again when it starts or is reloaded.
create or replace function outbox.set_schedule(schedule_name text, action text, actor text, reason text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
#variable_conflict use_variable
begin
    perform outbox_internal.require_schedule(schedule_name);
    case action
        when 'pause' then
            update outbox.schedule s set paused = true where s.name = schedule_name and not s.paused;
        when 'resume' then
            update outbox.schedule s
               set paused = false, after_at = greatest(clock_timestamp(), s.after_at), next_at = null, retry_at = null,
                   error = null, error_at = null
             where s.name = schedule_name and s.paused;
        when 'remove' then
            delete from outbox.schedule s where s.name = schedule_name;
        else
            raise exception using errcode = 'invalid_parameter_value', message = 'action must be pause, resume or remove';
    end case;
    if found then
        perform outbox_internal.record_action(
            'schedule ' || action, null, jsonb_build_object('schedule', schedule_name), 1, actor, reason);
        return true;
    end if;
    return false;
end
$$;
comment on function outbox.set_schedule is
    'Pause, resume or remove a schedule, and return whether that changed it. Recorded in outbox.audit.';

-- Raise unless there is a schedule of this name.
create or replace function outbox_internal.require_schedule(schedule_name text) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if not exists (select from outbox.schedule s where s.name = schedule_name) then
        raise exception using errcode = 'no_data_found',
            message = format('there is no schedule %s', coalesce(quote_literal(schedule_name), 'without a name')),
            hint = (select coalesce('There are: ' || string_agg(s.name, ', ' order by s.name), 'There is none.')
                      from (select s.name from outbox.schedule s order by s.name limit 20) s);
    end if;
end
$$;

-- Emit what a schedule has at a time, with the time in a header.
create or replace function outbox_internal.emit_schedule(s outbox.schedule, at timestamptz) returns uuid
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select outbox.emit(
        type => s.type, payload => s.payload, key => s.key, tenant => s.tenant,
        headers => coalesce(s.headers, '{}')
                   || jsonb_build_object('outbox-scheduled-for', to_char(at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')))
$$;
