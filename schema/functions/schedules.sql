-- Register the schedules of a relay's file: objects with name, cron, timezone, type, payload, headers, key and missed. The
-- relay that started or was reloaded last decides, as for sinks. Times begin after now only if cron or timezone is new:
-- a changed payload must not drop a time that is due. Other schedules stay as they are.
-- As in version 23, with tenant.
create or replace function outbox_internal.register_schedules(wanted jsonb) returns table (name text, generation bigint)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    if jsonb_array_length(wanted) > 1000 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('a file may have at most 1000 schedules, not %s', jsonb_array_length(wanted));
    end if;
    insert into outbox.schedule as s (name, cron, timezone, type, payload, headers, key, missed, tenant)
    select w.name, w.cron, w.timezone, w.type, w.payload, w.headers, w.key, w.missed, w.tenant
      from jsonb_to_recordset(wanted) w (
            name text, cron text, timezone text, type text, payload jsonb, headers jsonb, key text, missed text, tenant text)
     order by w.name
    on conflict (name) do update
       set cron = excluded.cron, timezone = excluded.timezone, type = excluded.type, payload = excluded.payload,
           headers = excluded.headers, key = excluded.key, missed = excluded.missed, tenant = excluded.tenant
     where (s.cron, s.timezone, s.type, s.payload, s.headers, s.key, s.missed, s.tenant)
           is distinct from (excluded.cron, excluded.timezone, excluded.type, excluded.payload, excluded.headers, excluded.key,
                             excluded.missed, excluded.tenant);
    return query
        select s.name, s.generation from outbox.schedule s
         where s.name in (select w.name from jsonb_to_recordset(wanted) w (name text));
end
$$;

-- Return those schedules that have the definitions of a relay's file, with their generations. Each object has the fields that
-- outbox_internal.register_schedules reads, and `seen`, a generation: a schedule that still has it is given this definition if `over`.
create or replace function outbox_internal.take_schedules(wanted jsonb) returns table (name text, generation bigint)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform from outbox.schedule s
     where s.name in (select w.name from jsonb_to_recordset(wanted) w (name text, over boolean) where w.over)
     order by s.name
       for update;
    update outbox.schedule s
       set cron = w.cron, timezone = w.timezone, type = w.type, payload = w.payload, headers = w.headers, key = w.key,
           missed = w.missed, tenant = w.tenant
      from jsonb_to_recordset(wanted) w (
            name text, cron text, timezone text, type text, payload jsonb, headers jsonb, key text, missed text, tenant text,
            seen bigint, over boolean)
     where s.name = w.name and s.generation = w.seen and w.over;
    return query
        select s.name, s.generation
          from outbox.schedule s
          join jsonb_to_recordset(wanted) w (
                name text, cron text, timezone text, type text, payload jsonb, headers jsonb, key text, missed text, tenant text)
            on w.name = s.name
         where (s.cron, s.timezone, s.type, s.payload, s.headers, s.key, s.missed, s.tenant)
               is not distinct from (w.cron, w.timezone, w.type, w.payload, w.headers, w.key, w.missed, w.tenant);
end
$$;

-- As outbox.fire_schedule in version 23, which it replaces, and with the number of events. A transaction emits at most 8 MiB,
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

-- Record why a relay did not find the next time of a schedule, or did not fire it, unless that was done or the schedule was
-- changed meanwhile. The same reason is written at most once a minute.
create or replace function outbox_internal.fail_schedule(name text, generation bigint, after_at timestamptz, next_at timestamptz, reason text)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    said constant text := outbox_internal.short_text(reason, 2000);
begin
    perform from outbox.schedule s
     where s.name = fail_schedule.name and s.generation = fail_schedule.generation and s.after_at = fail_schedule.after_at
       and s.next_at is not distinct from fail_schedule.next_at and not s.paused
       and (s.error is distinct from said or s.error_at < clock_timestamp() - interval '1 minute')
       for update skip locked;
    if not found then
        return false;
    end if;
    update outbox.schedule s set error = said, error_at = clock_timestamp(), retry_at = null
     where s.name = fail_schedule.name;
    return true;
end
$$;

-- Record which schedules the file of a relay has, as an object of names and of the generations that it knows, and return those
-- that have another generation by now. `held`: another live relay knows this one, so it is in the file of that relay.
create or replace function outbox_internal.hold_schedules(relay uuid, known jsonb)
returns table (name text, generation bigint, held boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    if (select count(*) from jsonb_object_keys(known)) > 1000 then
        raise exception using errcode = 'invalid_parameter_value', message = 'a relay has at most 1000 schedules';
    end if;
    update outbox.relay r set schedules = known
     where r.id = hold_schedules.relay and r.schedules is distinct from known;
    return query
    with other as materialized (
        select s.name, s.generation
          from outbox.schedule s
          join jsonb_each_text(known) k (name, generation) on k.name = s.name
         where k.generation <> s.generation::text
    ),
    alive as materialized (
        select e.name, e.generation
          from outbox.relay r
         cross join lateral jsonb_each_text(r.schedules) e (name, generation)
         where r.seen_at > clock_timestamp() - outbox_internal.alive_interval(null) and exists (select from other)
    )
    select o.name, o.generation,
           exists (select from alive a where a.name = o.name and a.generation = o.generation::text)
      from other o;
end
$$;

-- Write the first time of a schedule after `seen`, its after_at, which only a relay can find. False: this is out of date.
-- As in version 23. The reason of an earlier failure has passed.
create or replace function outbox_internal.place_schedule(name text, seen timestamptz, next timestamptz, generation bigint) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    update outbox.schedule s set next_at = next, error = null, error_at = null
     where s.name = place_schedule.name and s.generation = place_schedule.generation
       and s.next_at is null and s.after_at = seen;
    return found;
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

-- Pause, resume or remove a schedule. False: it was in this state already. Times that pass while it is paused are not missed:
-- a resumed schedule begins with the first time after now. A relay that has a removed schedule in its file registers it
-- again when it starts or is reloaded.
-- As in version 23. A resumed schedule has no time that failed.
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

-- A changed definition has a new generation. Times begin after now only if cron or timezone is new: a changed payload must not
-- drop a time that is due.
create or replace function outbox_internal.schedule_changed() returns trigger
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    new.generation := nextval('outbox.schedule_generation');
    if (new.cron, new.timezone) <> (old.cron, old.timezone) then
        new.after_at := greatest(clock_timestamp(), old.after_at);
        new.next_at := null;
    end if;
    new.retry_at := null;
    new.error := null;
    new.error_at := null;
    return new;
end
$$;

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

-- The live relays that have a schedule in their settings, by name.
-- As in version 23, and also by what relays of this version record.
create or replace function outbox_internal.relays_with_schedule(schedule_name text) returns text[]
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select array(select r.name from outbox.relay r
                  where r.seen_at > clock_timestamp() - outbox_internal.alive_interval(null)
                    and (r.schedules ? schedule_name or r.config ? format('schedules.%s.cron', schedule_name))
                  order by r.name limit 20)
$$;

-- Emit what a schedule has at a time, with the time in a header.
-- As in version 23, with tenant.
create or replace function outbox_internal.emit_schedule(s outbox.schedule, at timestamptz) returns uuid
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select outbox.emit(
        type => s.type, payload => s.payload, key => s.key, tenant => s.tenant,
        headers => coalesce(s.headers, '{}')
                   || jsonb_build_object('outbox-scheduled-for', to_char(at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')))
$$;

