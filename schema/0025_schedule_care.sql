-- Schedules: the file of the relays that stay is in force, bounded transactions, the reason why one does not fire, and tenants.
-- Deliveries can be selected by tenant. Relays made for version 2 work on this schema. Those of version 23 register and fire
-- schedules as before; what one of them registers is in force until no relay of this version has another definition.

-- ---------------------------------------------------------------------------------------------------------
-- The table
-- ---------------------------------------------------------------------------------------------------------

alter table outbox.schedule add column tenant text collate "C";
comment on column outbox.schedule.error is
    'Why the event at next_at was not emitted: the schema refused it if retry_at is set, and otherwise a relay says why.';
alter table outbox.relay add column schedules jsonb;
comment on column outbox.relay.schedules is 'Schedules of the relay''s file by name, with the generation that it knows of each.';

-- A changed definition has a new generation. Times begin after now only if cron or timezone is new: a changed payload must not
-- drop a time that is due.
create function outbox.schedule_changed() returns trigger
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
create trigger schedule_changed before update on outbox.schedule
for each row when ((old.cron, old.timezone, old.type, old.payload, old.headers, old.key, old.missed, old.tenant)
                   is distinct from
                   (new.cron, new.timezone, new.type, new.payload, new.headers, new.key, new.missed, new.tenant))
execute function outbox.schedule_changed();

-- ---------------------------------------------------------------------------------------------------------
-- Definitions
-- ---------------------------------------------------------------------------------------------------------

-- As in version 23, with tenant.
create or replace function outbox.register_schedules(wanted jsonb) returns table (name text, generation bigint)
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

-- Record which schedules the file of a relay has, as an object of names and of the generations that it knows, and return those
-- that have another generation by now. `held`: another live relay knows this one, so it is in the file of that relay.
create function outbox.hold_schedules(relay uuid, known jsonb)
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
         where r.seen_at > clock_timestamp() - outbox.alive_interval(null) and exists (select from other)
    )
    select o.name, o.generation,
           exists (select from alive a where a.name = o.name and a.generation = o.generation::text)
      from other o;
end
$$;

-- Return those schedules that have the definitions of a relay's file, with their generations. Each object has the fields that
-- outbox.register_schedules reads, and `seen`, a generation: a schedule that still has it is given this definition if `over`.
create function outbox.take_schedules(wanted jsonb) returns table (name text, generation bigint)
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

-- As in version 23, and also by what relays of this version record.
create or replace function outbox.relays_with_schedule(schedule_name text) returns text[]
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select array(select r.name from outbox.relay r
                  where r.seen_at > clock_timestamp() - outbox.alive_interval(null)
                    and (r.schedules ? schedule_name or r.config ? format('schedules.%s.cron', schedule_name))
                  order by r.name limit 20)
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Firing
-- ---------------------------------------------------------------------------------------------------------

-- As in version 23. The reason of an earlier failure has passed.
create or replace function outbox.place_schedule(name text, seen timestamptz, next timestamptz, generation bigint) returns boolean
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

-- As in version 23, with tenant.
create or replace function outbox.emit_schedule(s outbox.schedule, at timestamptz) returns uuid
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select outbox.emit(
        type => s.type, payload => s.payload, key => s.key, tenant => s.tenant,
        headers => coalesce(s.headers, '{}')
                   || jsonb_build_object('outbox-scheduled-for', to_char(at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')))
$$;

-- As outbox.fire_schedule in version 23, which it replaces, and with the number of events. A transaction emits at most 8 MiB,
-- and for two seconds, but at least one event: then the next time is the first one that it did not come to. The reason of a
-- refusal is recorded only if its text is of this schema: that of a trigger may quote the payload.
create function outbox.fire_schedule_times(
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
            perform outbox.emit_schedule(s, at);
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
                            then outbox.short_text(sqlerrm, 2000)
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

-- For relays of version 23, which read only the outcome.
create or replace function outbox.fire_schedule(
    name text, seen timestamptz, next timestamptz, generation bigint, times timestamptz[] default null
) returns text
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select f.outcome from outbox.fire_schedule_times(name, seen, next, generation, times) f
$$;

-- Record why a relay did not find the next time of a schedule, or did not fire it, unless that was done or the schedule was
-- changed meanwhile. The same reason is written at most once a minute.
create function outbox.fail_schedule(name text, generation bigint, after_at timestamptz, next_at timestamptz, reason text)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    said constant text := outbox.short_text(reason, 2000);
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

-- ---------------------------------------------------------------------------------------------------------
-- Operators
-- ---------------------------------------------------------------------------------------------------------

-- As in version 23. A resumed schedule has no time that failed.
create or replace function outbox.set_schedule(schedule_name text, action text, actor text, reason text) returns boolean
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
               set paused = false, after_at = greatest(clock_timestamp(), s.after_at), next_at = null, retry_at = null,
                   error = null, error_at = null
             where s.name = schedule_name and s.paused;
        when 'remove' then
            delete from outbox.schedule s where s.name = schedule_name;
        else
            raise exception using errcode = 'invalid_parameter_value', message = 'action must be pause, resume or remove';
    end case;
    if found then
        perform outbox.record_action(
            'schedule ' || action, null, jsonb_build_object('schedule', schedule_name), 1, actor, reason);
        return true;
    end if;
    return false;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Deliveries of a tenant
-- ---------------------------------------------------------------------------------------------------------

alter type outbox.delivery_filter add attribute tenant text;

-- True if an event is in the log, and belongs to this tenant. One look into the index of the partition of its day: a subquery
-- with a value cannot become a scan of the log.
create function outbox.is_of_tenant(event_id bigint, event_shard smallint, emitted_at timestamptz, tenant text) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce((select e.tenant from outbox.event e
                      where e.id = event_id and e.shard = event_shard and e.created_at = emitted_at limit 1) = tenant, false)
$$;

-- As in version 22, with one field more: `tenant`, of events that are still in the log.
create or replace function outbox.read_filter(filter jsonb, at timestamptz) returns outbox.delivery_filter
language plpgsql stable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    names constant text[] := '{sink, type, key, tenant, error, kind, status, since, until, as_of, uids, states}';
    words constant text[] := '{dead, waiting, held, scheduled}';
    most_uids constant integer := 1000;
    read outbox.delivery_filter;
    name text;
    value jsonb;
    given text;
    fault text;
begin
    if jsonb_typeof(filter) is distinct from 'object' then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('a filter must be a JSON object, not %s', coalesce(jsonb_typeof(filter), 'null'));
    end if;
    if jsonb_typeof(filter -> 'as_of') = 'string' then
        at := outbox.past_time('as_of', filter -> 'as_of', at);
        read.as_of := at;
    end if;
    for name, value in select * from jsonb_each(filter) loop
        given := value #>> '{}';
        fault := case
            when name <> all (names) then
                format('a filter has no field "%s"; it has: %s', left(name, 60), array_to_string(names, ', '))
            when name in ('uids', 'states') and jsonb_typeof(value) <> 'array'
                 or name in ('sink', 'type', 'key', 'tenant', 'error', 'kind', 'since', 'until', 'as_of')
                    and jsonb_typeof(value) <> 'string'
                 or name = 'status' and jsonb_typeof(value) <> 'number' then
                format('%s of a filter must be %s, not %s', name,
                       case name when 'status' then 'a number' when 'uids' then 'an array' when 'states' then 'an array'
                                 else 'a string' end, jsonb_typeof(value))
            when name = 'type' and (given = '' or given collate "C" ~ '[^\x21-\x7e]' or length(given) > 510) then
                'type of a filter must be a pattern of visible ASCII characters, such as order.*'
            when name = 'key' and octet_length(given) > 1024 then
                'key of a filter must have at most 1024 bytes'
            when name = 'tenant' and octet_length(given) not between 1 and 255 then
                'tenant of a filter must have 1 to 255 bytes'
            when name = 'error' and (given = '' or length(given) > 500) then
                'error of a filter must have 1 to 500 characters'
            when name = 'kind' and length(given) > 200 then
                'kind of a filter must have at most 200 characters'
            when name = 'status' and given collate "C" !~ '^-?[0-9]{1,9}$' then
                'status of a filter must be an integer of at most 9 digits'
            when name = 'uids' and jsonb_array_length(value) not between 1 and most_uids then
                format('uids of a filter must be 1 to %s uids, not %s', most_uids, jsonb_array_length(value))
            when name = 'states' and (jsonb_array_length(value) = 0
                                      or exists (select from jsonb_array_elements(value) s (word)
                                                  where s.word #>> '{}' is null or s.word #>> '{}' <> all (words))) then
                format('states of a filter must be some of %s: %s', array_to_string(words, ', '), left(value::text, 60))
            when name = 'uids' and exists (
                    select from jsonb_array_elements(value) u (uid)
                     where ((u.uid #>> '{}') collate "C" ~* '^[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}$') is not true) then
                'uids of a filter must be UUIDs, as emit returns them'
        end;
        if fault is not null then
            raise exception using errcode = 'invalid_parameter_value', message = fault;
        end if;
        case name
            when 'sink' then read.sink := given;
            when 'type' then
                read.type_like := replace(
                    replace(replace(replace(given, '\', '\\'), '%', '\%'), '_', '\_'), '*', '%');
            when 'key' then read.key := given;
            when 'tenant' then read.tenant := given;
            when 'error' then read.error := lower(given);
            when 'kind' then read.kind := given;
            when 'status' then read.status := given::integer;
            when 'since' then read.since := outbox.past_time('since', value, at);
            when 'until' then read.until := outbox.as_time('until', value, at);
            when 'as_of' then null;
            when 'uids' then read.uids := array(select distinct jsonb_array_elements_text(value)::uuid);
            else read.states := array(select distinct jsonb_array_elements_text(value));
        end case;
    end loop;
    if read.since > read.until then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('since (%s) is after until (%s)', read.since, read.until);
    end if;
    if read.sink is not null then
        perform outbox.require_sink(read.sink);
    end if;
    read.states := coalesce(read.states, '{dead}');
    return read;
end
$$;

-- As in version 22, with the tenant.
create or replace function outbox.is_meant(d outbox.delivery, f outbox.delivery_filter) returns boolean
language sql stable
return case when f.sink is null then d.sink < '~' else d.sink = f.sink end
   and outbox.delivery_state(d.state, d.ordered, d.deliver_at) = any (f.states)
   and (f.type_like is null or d.type like f.type_like)
   and (f.key is null or d.key = f.key)
   and (f.status is null or d.last_status = f.status)
   and (f.since is null or d.created_at >= f.since)
   and (f.until is null or d.created_at < f.until)
   and (f.uids is null or d.uid = any (f.uids))
   and (f.as_of is null or outbox.was_counted(d.state, d.ordered, d.deliver_at, d.since, d.last_attempt_at, f.as_of,
                                              not (f.status is null and f.error is null and f.kind is null),
                                              'scheduled' = any (f.states)))
   and (f.error is null
        or case when octet_length(f.error) = length(f.error) then strpos(lower(d.last_error collate "C"), f.error)
                else strpos(lower(d.last_error), f.error) end > 0)
   and (f.kind is null
        or (d.last_status is null and starts_with(coalesce(d.last_error, ''), substring(f.kind from '^[^N…]*'))
            and outbox.error_kind(d.last_error) = f.kind))
   and (f.tenant is null or outbox.is_of_tenant(d.id, d.shard, d.created_at, f.tenant));

-- As in version 22, with the tenant.
create or replace function outbox.deliveries(
    filter jsonb, most integer default 50, before_id bigint default null, before_sink text default null
) returns table (
    id bigint, uid uuid, sink text, type text, key text, state text, attempts integer, error text, status integer,
    since timestamptz, due_at timestamptz, created_at timestamptz
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set jit = off
as $$
#variable_conflict use_column
declare
    most_looks constant integer := 1000000;
    f outbox.delivery_filter := outbox.read_filter(filter, clock_timestamp());
    of_tenant constant text := f.tenant;
    dead_alone constant boolean := f.states = '{dead}';
    top constant bigint := coalesce(before_id, 9223372036854775807);
    wanted constant integer := least(greatest(coalesce(most, 50), 0), 1000);
    ids bigint[];
    sinks text[];
begin
    f.tenant := null;  -- outbox.is_meant would look for each row in a statement of its own, which takes ten times as long
    if f.uids is null and dead_alone
       and (f.sink is not null
            or (f.type_like is null and f.key is null and f.error is null and f.kind is null and f.status is null
                and f.since is null and f.until is null and f.as_of is null and of_tenant is null)) then
        select array_agg(m.id), array_agg(m.sink) into ids, sinks
          from (
            select k.name as sink, l.id
              from outbox.sink k
             cross join lateral (
                select r.id
                  from (
                    select d.id, outbox.is_meant(d, f)
                           and (of_tenant is null
                                or (select e.tenant from outbox.event e
                                     where e.id = d.id and e.shard = d.shard and e.created_at = d.created_at
                                     limit 1) = of_tenant) as meant
                      from outbox.delivery d
                     where d.state = 'dead' and d.sink between k.name and k.name
                       and d.id <= top and (d.id < top or d.sink < before_sink)
                     order by d.sink desc, d.id desc
                     limit most_looks
                  ) r
                 where r.meant
                 limit wanted
             ) l
             where f.sink is null or k.name = f.sink
             order by l.id desc, k.name desc
             limit wanted
          ) m;
    else
        select array_agg(m.id), array_agg(m.sink) into ids, sinks
          from (
            select r.id, r.sink
              from (
                select d.id, d.sink, outbox.is_meant(d, f)
                           and (of_tenant is null
                                or (select e.tenant from outbox.event e
                                     where e.id = d.id and e.shard = d.shard and e.created_at = d.created_at
                                     limit 1) = of_tenant) as meant
                  from outbox.delivery d
                 where (not dead_alone or d.state = 'dead') and (f.uids is null or d.uid = any (f.uids))
                   and d.id <= top and (d.id < top or d.sink < before_sink)
                 order by d.id desc, d.sink desc
                 limit most_looks
              ) r
             where r.meant
             limit wanted
          ) m;
    end if;
    return query
    select d.id, d.uid, d.sink::text, d.type::text, d.key::text,
           outbox.delivery_state(d.state, d.ordered, d.deliver_at), d.attempts, d.last_error, d.last_status,
           outbox.loadable_time(case when d.state = 'dead' then greatest(d.last_attempt_at, d.since) else d.since end),
           case when d.state <> 'dead' then outbox.loadable_time(d.due_at) end, outbox.loadable_time(d.created_at)
      from unnest(ids, sinks) w (id, sink)
      join outbox.delivery d on d.id = w.id and d.sink = w.sink
     order by d.id desc, d.sink desc;
end
$$;

-- As in version 22, with the tenant.
create or replace function outbox.delivery_summary(filter jsonb) returns table (
    sink text, type text, state text, error text, status integer, example text, count bigint, first timestamptz,
    last timestamptz, exact boolean
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set jit = off
as $$
#variable_conflict use_column
declare
    most constant integer := 100000;
    most_groups constant integer := 1000;
    most_looks constant integer := 1000000;
    f outbox.delivery_filter := outbox.read_filter(filter, clock_timestamp());
    of_tenant constant text := f.tenant;
    dead_alone constant boolean := f.states = '{dead}';
    unfiltered constant boolean := dead_alone and f.uids is null and f.type_like is null and f.key is null
        and f.error is null and f.kind is null and f.status is null and f.since is null and f.until is null and f.as_of is null
        and of_tenant is null;
    more boolean;
    first_id bigint;
begin
    f.tenant := null;  -- outbox.is_meant would look for each row in a statement of its own, which takes ten times as long
    more := exists (
        select from outbox.delivery d
         where (not dead_alone or d.state = 'dead') and (f.sink is null or d.sink = f.sink)
           and (f.uids is null or d.uid = any (f.uids))
        offset most_looks
    );
    if more then
        select min(l.id) into first_id
          from (
            select d.id from outbox.delivery d
             where (not dead_alone or d.state = 'dead') and (f.sink is null or d.sink = f.sink)
               and (f.uids is null or d.uid = any (f.uids))
             order by d.id desc
             limit most_looks
          ) l;
    end if;
    return query
    with newest as materialized (
        select d.sink, d.type, outbox.delivery_state(d.state, d.ordered, d.deliver_at) as state,
               left(d.last_error, 200) as error, d.last_status as status,
               case when d.state = 'dead' then greatest(d.last_attempt_at, d.since) else d.since end as at
          from outbox.delivery d
         where (not dead_alone or d.state = 'dead') and (f.sink is null or d.sink = f.sink)
           and (f.uids is null or d.uid = any (f.uids))
           and (first_id is null or d.id >= first_id)
           and case when unfiltered then d.sink < '~' else outbox.is_meant(d, f)
                    and (of_tenant is null
                         or (select e.tenant from outbox.event e
                              where e.id = d.id and e.shard = d.shard and e.created_at = d.created_at limit 1) = of_tenant) end
         order by d.id desc
         limit most + 1
    ),
    grouped as (
        select n.sink, n.type, n.state, n.status, n.error, count(*) as count, min(n.at) as first, max(n.at) as last
          from newest n
         group by n.sink, n.type, n.state, n.status, n.error
    ),
    classed as (
        select g.*,
               case when g.status is null then nullif(outbox.error_kind(g.error), '') end as class
          from grouped g
    )
    select c.sink::text, c.type::text, c.state, c.class, c.status, min(c.error), sum(c.count)::bigint,
           outbox.loadable_time(min(c.first)), outbox.loadable_time(max(c.last)), (select count(*) from newest) <= most
           and not more
      from classed c
     group by c.sink, c.type, c.state, c.class, c.status
     order by sum(c.count) desc, c.sink, c.type, c.class, c.status
     limit most_groups;
end
$$;

-- As in version 3, with the tenant.
create or replace function outbox.count_deliveries(filter jsonb, out matched bigint, out exact boolean)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set jit = off
as $$
declare
    most constant integer := 10000;
    most_looks constant integer := 1000000;
    f outbox.delivery_filter := outbox.read_filter(filter, clock_timestamp());
    of_tenant constant text := f.tenant;
    dead_alone constant boolean := f.states = '{dead}';
begin
    f.tenant := null;  -- outbox.is_meant would look for each row in a statement of its own, which takes ten times as long
    select count(*) into matched
      from (
        select from (
            select outbox.is_meant(d, f)
                           and (of_tenant is null
                                or (select e.tenant from outbox.event e
                                     where e.id = d.id and e.shard = d.shard and e.created_at = d.created_at
                                     limit 1) = of_tenant) as meant
              from outbox.delivery d
             where (not dead_alone or d.state = 'dead') and (f.sink is null or d.sink = f.sink)
               and (f.uids is null or d.uid = any (f.uids))
             limit most_looks
        ) l
         where l.meant
         limit most + 1
      ) r;
    exact := matched <= most and not exists (
        select from outbox.delivery d
         where (not dead_alone or d.state = 'dead') and (f.sink is null or d.sink = f.sink)
           and (f.uids is null or d.uid = any (f.uids))
        offset most_looks
    );
    matched := least(matched, most);
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- No compilation
-- ---------------------------------------------------------------------------------------------------------

-- Servers before 18 take a query that may not scan a small table for expensive, and compile it. That takes seconds, in each
-- session behind a pooler that passes no settings on.
do $$
declare
    f oid;
begin
    for f in
        select p.oid from pg_proc p
         where p.pronamespace = 'outbox'::regnamespace and 'enable_seqscan=off' = any (p.proconfig)
           and not 'jit=off' = any (p.proconfig)
    loop
        execute format('alter function %s set jit = off', f::regprocedure);
    end loop;
end
$$;
