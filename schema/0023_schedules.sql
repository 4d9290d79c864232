-- Schedules: events that relays emit at the times of a cron expression. Relays made for version 2 work on this schema: they
-- fire no schedule.

-- ---------------------------------------------------------------------------------------------------------
-- The table
-- ---------------------------------------------------------------------------------------------------------

create sequence outbox.schedule_generation cache 1;

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
    check (next_at > after_at)
);
alter sequence outbox.schedule_generation owned by outbox.schedule.generation;
comment on table outbox.schedule is 'Schedules from the files of the relays. Change the file, or call outbox.set_schedule.';
comment on column outbox.schedule.generation is 'A number that is new after each change of the definition.';
comment on column outbox.schedule.after_at is 'No time up to this one is emitted, or will be.';
comment on column outbox.schedule.next_at is 'The next time; null: a relay has yet to find the first one after after_at.';
comment on column outbox.schedule.last_at is 'The newest time that was emitted.';
comment on column outbox.schedule.retry_at is 'The schema refused the event at next_at: it is tried again at this time.';

-- ---------------------------------------------------------------------------------------------------------
-- Relays
-- ---------------------------------------------------------------------------------------------------------

-- Register the schedules of a relay's file: objects with name, cron, timezone, type, payload, headers, key and missed. The
-- relay that started or was reloaded last decides, as for sinks. Times begin after now only if cron or timezone is new:
-- a changed payload must not drop a time that is due. Other schedules stay as they are.
create function outbox.register_schedules(wanted jsonb) returns table (name text, generation bigint)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    if jsonb_array_length(wanted) > 1000 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('a file may have at most 1000 schedules, not %s', jsonb_array_length(wanted));
    end if;
    insert into outbox.schedule as s (name, cron, timezone, type, payload, headers, key, missed)
    select w.name, w.cron, w.timezone, w.type, w.payload, w.headers, w.key, w.missed
      from jsonb_to_recordset(wanted) w (
            name text, cron text, timezone text, type text, payload jsonb, headers jsonb, key text, missed text)
     order by w.name
    on conflict (name) do update
       set cron = excluded.cron, timezone = excluded.timezone, type = excluded.type, payload = excluded.payload,
           headers = excluded.headers, key = excluded.key, missed = excluded.missed,
           generation = nextval('outbox.schedule_generation'),
           after_at = case when (s.cron, s.timezone) = (excluded.cron, excluded.timezone) then s.after_at
                           else greatest(clock_timestamp(), s.after_at) end,
           next_at = case when (s.cron, s.timezone) = (excluded.cron, excluded.timezone) then s.next_at end,
           retry_at = null, error = null, error_at = null
     where (s.cron, s.timezone, s.type, s.payload, s.headers, s.key, s.missed)
           is distinct from (excluded.cron, excluded.timezone, excluded.type, excluded.payload, excluded.headers, excluded.key,
                             excluded.missed);
    return query
        select s.name, s.generation from outbox.schedule s
         where s.name in (select w.name from jsonb_to_recordset(wanted) w (name text));
end
$$;

-- Write the first time of a schedule after `seen`, its after_at, which only a relay can find. False: this is out of date.
create function outbox.place_schedule(name text, seen timestamptz, next timestamptz, generation bigint) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    update outbox.schedule s set next_at = next
     where s.name = place_schedule.name and s.generation = place_schedule.generation
       and s.next_at is null and s.after_at = seen;
    return found;
end
$$;

-- Emit what a schedule has at a time, with the time in a header.
create function outbox.emit_schedule(s outbox.schedule, at timestamptz) returns uuid
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select outbox.emit(
        type => s.type, payload => s.payload, key => s.key,
        headers => coalesce(s.headers, '{}')
                   || jsonb_build_object('outbox-scheduled-for', to_char(at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')))
$$;

-- Fire a schedule: compare its next time with `seen`, write `next` in its place, and emit, all in the caller's transaction. So
-- each time is emitted once, whatever relays run or crash. Only the clock of this server says whether a time has come, and
-- whether it was missed: late by more than a minute.
--
-- A relay computes times, and passes those of [seen, next) that it wants: all of them up to now if missed is `all`, the newest
-- missed one if it is `one`, none if it is `skip`; without `times`, only `seen`. Returned is
--   emitted     the events are written
--   passed over the times were missed, and no event was to be written
--   refused     the schema refused an event: nothing is written but the reason, and the time is tried again in a minute
--   superseded  another relay was first, or the schedule was changed, paused or removed
--   early       it is not yet `seen`
--   again       the relay looked too long ago, or the clock went back: it must compute again
create function outbox.fire_schedule(
    name text, seen timestamptz, next timestamptz, generation bigint, times timestamptz[] default null
) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    s outbox.schedule;
    fired timestamptz[] := coalesce(times, array[seen]);
    at timestamptz;
    now_at timestamptz;
    horizon timestamptz;
    refusal text;
begin
    if next is null or next <= seen or cardinality(fired) > 1000
       or exists (select from unnest(fired) f (at) where f.at is null or f.at < seen or f.at >= next) then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'times must be at most 1000, from seen on, and before next';
    end if;
    select c.* into s from outbox.schedule c
     where c.name = fire_schedule.name and c.generation = fire_schedule.generation and c.next_at = seen and not c.paused
       for update skip locked;
    if not found then
        return 'superseded';
    end if;
    now_at := clock_timestamp();
    horizon := now_at - interval '1 minute';
    if seen > now_at or fired[cardinality(fired)] > now_at then
        return 'early';
    end if;
    if s.missed = 'all' then
        if fired[1] is distinct from seen then
            return 'again';
        end if;
    elsif seen >= horizon then
        if fired is distinct from array[seen] then
            return 'again';
        end if;
    elsif next < horizon then
        return 'again';
    elsif s.missed = 'one' then
        fired := array[coalesce(fired[cardinality(fired)], seen)];
    else
        fired := '{}';
    end if;
    begin
        foreach at in array fired loop
            perform outbox.emit_schedule(s, at);
        end loop;
    exception
        when invalid_parameter_value then
            refusal := outbox.short_text(sqlerrm, 2000);
        when others then
            -- Errors that pass by themselves are the relay's: it logs them, and tries again soon.
            if sqlstate ~ '^(08|25|40|53|55|57|58|XX)' then
                raise;
            end if;
            refusal := format('the database refused the event (%s)', sqlstate);  -- the text may quote the payload
    end;
    if refusal is not null then
        update outbox.schedule c
           set retry_at = now_at + interval '1 minute', error = refusal, error_at = now_at
         where c.name = s.name;
        return 'refused';
    end if;
    update outbox.schedule c
       set after_at = greatest(s.after_at, seen, fired[cardinality(fired)]), next_at = next,
           last_at = coalesce(fired[cardinality(fired)], s.last_at), retry_at = null, error = null, error_at = null
     where c.name = s.name;
    return case when cardinality(fired) = 0 then 'passed over' else 'emitted' end;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Operators
-- ---------------------------------------------------------------------------------------------------------

-- Raise unless there is a schedule of this name.
create function outbox.require_schedule(schedule_name text) returns void
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

-- Pause, resume or remove a schedule. False: it was in this state already. Times that pass while it is paused are not missed:
-- a resumed schedule begins with the first time after now. A relay that has a removed schedule in its file registers it
-- again when it starts or is reloaded.
create function outbox.set_schedule(schedule_name text, action text, actor text, reason text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
#variable_conflict use_variable
begin
    perform outbox.require_schedule(schedule_name);
    case action
        when 'pause' then
            update outbox.schedule s set paused = true where s.name = schedule_name and not s.paused;
        when 'resume' then
            update outbox.schedule s
               set paused = false, after_at = greatest(clock_timestamp(), s.after_at), next_at = null, retry_at = null
             where s.name = schedule_name and s.paused;
        when 'remove' then
            delete from outbox.schedule s where s.name = schedule_name;
        else
            raise exception using errcode = 'invalid_parameter_value', message = 'action must be pause, resume or remove';
    end case;
    if found then
        perform outbox.record_action('schedule ' || action, null, jsonb_build_object('schedule', schedule_name), 1, actor, reason);
        return true;
    end if;
    return false;
end
$$;

-- Emit the event of a schedule now, and return its uid. The header has the present time, and the times stay as they are.
create function outbox.run_schedule(schedule_name text, actor text, reason text) returns uuid
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    s outbox.schedule;
    uid uuid;
begin
    perform outbox.require_schedule(schedule_name);
    select c.* into s from outbox.schedule c where c.name = schedule_name;
    uid := outbox.emit_schedule(s, clock_timestamp());
    perform outbox.record_action('schedule run', null, jsonb_build_object('schedule', schedule_name, 'uid', uid), 1, actor, reason);
    return uid;
end
$$;

-- The live relays that have a schedule in their settings, by name.
create function outbox.relays_with_schedule(schedule_name text) returns text[]
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select array(select r.name from outbox.relay r
                  where r.seen_at > clock_timestamp() - outbox.alive_interval(null)
                    and r.config ? format('schedules.%s.cron', schedule_name)
                  order by r.name limit 20)
$$;
