-- Actions of people: each leaves a row of `audit` in the transaction of the change. Relays made for version 2 work on
-- this schema.

-- Every table that changes from version 2 on is locked before anything does, as in version 2. The log comes first, then
-- sinks: transactions hold these locks for long. A try takes less than `deadlock_timeout`, so no transaction that has locked
-- several of them is ended by a deadlock.
do $$
declare
    tries constant integer := 10;
    patience constant integer := (select s.setting::integer from pg_settings s where s.name = 'deadlock_timeout');
    lock_timeout_before constant text := current_setting('lock_timeout');
begin
    for attempt in 1..tries loop
        begin
            perform set_config('lock_timeout', greatest(patience / 2, 1)::text, true);
            lock table outbox.event in access exclusive mode;
            perform set_config('lock_timeout', greatest(patience / 20, 1)::text, true);
            lock table outbox.sink, outbox.shard, outbox.relay, outbox.delivery in access exclusive mode;
            exit;
        exception when lock_not_available or deadlock_detected then
            if attempt = tries then
                raise;
            end if;
        end;
        perform pg_sleep(patience / 10000.0);
    end loop;
    perform set_config('lock_timeout', lock_timeout_before, true);
end
$$;

-- Keep no statistics of columns of a table and its partitions: they hold values, also of rows that are gone, which an
-- erasure could not reach (see version 9). ANALYZE collects none from now on, and those that there are go, by giving the
-- column its own type: PostgreSQL refuses that while a view or the like depends on the column, and would build an index on
-- it again, so no column has one.
create function outbox.keep_no_statistics(of_table regclass, columns text[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    c record;
begin
    for c in
        select a.attname as name, format_type(a.atttypid, a.atttypmod)
               || case when a.attcollation <> 0 then ' collate ' || a.attcollation::regcollation::text else '' end as type
          from pg_attribute a
         where a.attrelid = of_table and a.attname = any (columns)
    loop
        execute format('alter table %s alter column %I set statistics 0', of_table, c.name);
        continue when not exists (
            select from pg_stats s
             where s.schemaname = 'outbox' and s.attname = c.name
               and format('%I.%I', s.schemaname, s.tablename)::regclass in (
                    select of_table union all select i.inhrelid::regclass from pg_inherits i where i.inhparent = of_table));
        begin
            execute format('alter table %s alter column %I type %s', of_table, c.name, c.type);
        exception when feature_not_supported then
            raise notice 'statistics of column % of % are kept, because another object depends on it: they hold values',
                c.name, of_table;
        end;
    end loop;
end
$$;

select outbox.keep_no_statistics('outbox.delivery', '{payload, headers, last_error, last_attempt}'),
       outbox.keep_no_statistics('outbox.sink', '{last_error, paused_reason}');

-- ---------------------------------------------------------------------------------------------------------
-- Audit
-- ---------------------------------------------------------------------------------------------------------

-- `role_name` is the session's, or the one that it took with SET ROLE, and `login` is the session's in any case: no caller
-- can choose them. `actor` is what the caller says who it is. An action on many rows, in many transactions, is one row,
-- whose count rises with each of them.
create table outbox.audit (
    id bigint primary key generated always as identity,
    at timestamptz not null default clock_timestamp(),
    role_name text not null default outbox.emitter(),
    login text not null default session_user,
    actor text,
    action text not null,
    sink text collate "C",
    filter jsonb,
    count bigint not null default 0,
    reason text
);
create index audit_at on outbox.audit (at);

-- The key of keyed hashes: who does not know it cannot find out by trial which key or uid was meant.
create table outbox.hash_key (
    single boolean primary key default true check (single),
    key bytea not null
);
insert into outbox.hash_key (key)
values (decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

-- A value that is recorded without being shown: equal values have equal hashes in this database, and in no other.
create function outbox.keyed_hash(value text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select 'hash:' || left(encode(sha256(h.key || sha256(h.key || convert_to(value, 'UTF8'))), 'hex'), 32)
      from outbox.hash_key h
$$;

-- A filter as it is recorded: the key is replaced by its hash, the uids by their number, the hashes of up to 100 of them and
-- one hash of all.
create function outbox.hashed_filter(filter jsonb) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when filter is not null then coalesce(jsonb_object_agg(
               f.name,
               case when f.name = 'key' and jsonb_typeof(f.value) = 'string'
                    then to_jsonb(outbox.keyed_hash(f.value #>> '{}'))
                    when f.name = 'uids' and jsonb_typeof(f.value) = 'array'
                    then (select jsonb_build_object(
                                     'count', count(*), 'all', outbox.keyed_hash(string_agg(u.uid, ',' order by u.uid)),
                                     'hashes', jsonb_agg(outbox.keyed_hash(u.uid) order by u.uid) filter (where u.n <= 100))
                            from (select d.uid, row_number() over (order by d.uid) as n
                                    from (select distinct lower(jsonb_array_elements_text(f.value)) collate "C" as uid) d) u)
                    else f.value end), '{}') end
      from jsonb_each(case when jsonb_typeof(filter) = 'object' then filter end) f (name, value)
$$;

-- The beginning of a text that has at most `most` bytes, cut between characters.
create function outbox.short_text(said text, most_bytes integer) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    said := left(said, most_bytes);
    while octet_length(said) > most_bytes loop
        said := left(said, -1);
    end loop;
    return said;
end
$$;

-- Record an action and return its number. With `audit_id`, count on one of this session's role instead, which must be the
-- same action, begun at most a day ago: no row of the audit tells of something else than was done under it.
create function outbox.record_action(
    action text, sink text, filter jsonb, changed bigint, actor text, reason text, audit_id bigint default null
) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    recorded bigint;
begin
    if audit_id is not null then
        update outbox.audit a set count = a.count + changed
         where a.id = audit_id and a.action = action and a.role_name = outbox.emitter() and a.login = session_user
           and a.at > clock_timestamp() - interval '1 day' and a.actor is not distinct from actor
           and a.sink is not distinct from sink and a.filter is not distinct from outbox.hashed_filter(filter)
           and a.reason is not distinct from reason
        returning a.id into recorded;
        if recorded is null then
            raise exception using errcode = 'invalid_parameter_value',
                message = format('audit_id %s is not the number of an action "%s" of today with this role, actor, filter and reason',
                                 audit_id, action),
                hint = 'Leave audit_id out to begin a new action.';
        end if;
        return recorded;
    end if;
    if octet_length(actor) > 255 or octet_length(reason) > 2000 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s must have at most %s bytes',
                             case when octet_length(actor) > 255 then 'actor' else 'reason' end,
                             case when octet_length(actor) > 255 then 255 else 2000 end);
    end if;
    insert into outbox.audit (actor, action, sink, filter, count, reason)
    values (actor, action, sink, outbox.hashed_filter(filter), changed, reason)
    returning id into recorded;
    return recorded;
end
$$;

-- Raise in a transaction that does not see what is committed before it has its locks.
create function outbox.require_read_committed(called text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'invalid_transaction_state',
            message = format('%s must see what is committed before it has its locks', called),
            hint = 'Run it in a transaction that is READ COMMITTED.';
    end if;
end
$$;

-- Let the server end a session that leaves the rest of this transaction idle for 5 seconds: its locks stop the relays.
create function outbox.end_when_idle() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if (select s.setting::integer from pg_settings s where s.name = 'idle_in_transaction_session_timeout')
       not between 1 and 5000 then
        perform set_config('idle_in_transaction_session_timeout', '5s', true);
    end if;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Dead letters and other exceptions
-- ---------------------------------------------------------------------------------------------------------

-- Marks of what was discarded: without them, nothing would distinguish such an event from a delivered one.
create table outbox.discarded (
    sink text collate "C" not null,
    id bigint not null,
    uid uuid not null,
    at timestamptz not null default clock_timestamp(),
    role_name text not null default outbox.emitter(),
    actor text,
    reason text not null,
    primary key (sink, id)
);
create index discarded_uid on outbox.discarded (uid);

-- A sink that is removed takes its marks with it: another sink of its name has discarded nothing.
create function outbox.marks_deleted() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from outbox.discarded m where m.sink = any (array(select r.name from removed r));
    return null;
end
$$;

create trigger marks_deleted after delete on outbox.sink
referencing old table as removed
for each statement execute function outbox.marks_deleted();

-- True if the position of a shard has passed an event of the log (see outbox_relay/domain/window.py): the event is
-- visible in A, or it is visible in B and not after the last id done. Ids up to the floor belong to an older numbering,
-- whose last window ends at B: of its ids up to A's sequence value only those that were running at A are left. The same
-- holds of a position that a seek to a time has set: its A has a sequence value, and no transaction was running.
create function outbox.position_passed(
    event_id bigint, event_xid xid8, a_seq bigint, a_snapshot pg_snapshot, a_next bigint, b_snapshot pg_snapshot,
    last_id bigint, floor bigint
) returns boolean
language sql stable
return case
    when b_snapshot::text = '9223372036854775807:9223372036854775807:' then
        event_id <= last_id
        or (event_id <= a_seq and (pg_visible_in_snapshot(event_xid, a_snapshot) or event_xid >= a_next::text::xid8))
    else
        pg_visible_in_snapshot(event_xid, a_snapshot)
        or event_id <= least(floor, a_seq)
        or coalesce(pg_visible_in_snapshot(event_xid, b_snapshot)
                    and (event_id <= last_id or event_id <= a_seq and event_xid >= a_next::text::xid8), false)
end;

-- `since` of a dead row is when it died, whatever it died of and whichever relay says so: keep_dead_days counts from it.
create function outbox.row_died() returns trigger
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    new.since := clock_timestamp();
    return new;
end
$$;

create trigger row_died before update of state on outbox.delivery
for each row when (old.state <> 'dead' and new.state = 'dead') execute function outbox.row_died();

-- The state of a row in the words that people see.
create function outbox.delivery_state(state text, ordered boolean, deliver_at timestamptz) returns text
language sql stable
return case when state = 'waiting' and not ordered and deliver_at > now() then 'scheduled' else state end;

-- A time that every client can load: the nearest one in the years 1 to 9998.
create function outbox.loadable_time(value timestamptz) returns timestamptz
language sql immutable
return case when value is not null then greatest(least(value, '9998-12-31 00:00:00+00'), '0001-01-02 00:00:00+00') end;

-- Read a time that was given as `name`: ISO 8601 with its zone, or an age before `at` as ISO 8601 duration (PT7200S). An age
-- that reaches back before the year 1 is the beginning of that year.
create function outbox.as_time(name text, value jsonb, at timestamptz) returns timestamptz
language plpgsql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set standard_conforming_strings = on
set datestyle = 'ISO, YMD'
set intervalstyle = 'postgres'
as $$
declare
    given constant text collate "C" := case when jsonb_typeof(value) = 'string' then value #>> '{}' end;
    is_age constant boolean := given ~ '^P(?=.*[0-9])[0-9.YMWDTHS]{1,60}$';
    found timestamptz;
begin
    begin
        if is_age then
            found := outbox.loadable_time(at - given::interval);
        elsif given ~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.]{1,60} ?(Z|[+-][0-9]{2}(:?[0-9]{2}){0,2})$' then
            found := given::timestamptz;
        end if;
    exception
        when datetime_field_overflow or interval_field_overflow then
            found := case when is_age then outbox.loadable_time('-infinity') end;
        when data_exception then
            null;  -- no such time
    end;
    if found is null or found <> outbox.loadable_time(found) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s must be a time with its zone in the years 1 to 9998, such as 2026-11-23T08:00:00Z, or an age, '
                             'such as PT7200S (in a command 2h): %s', name, coalesce(left(value::text, 60), 'null'));
    end if;
    return found;
end
$$;

-- As outbox.as_time, of a time that does not lie in the future.
create function outbox.past_time(name text, value jsonb, at timestamptz) returns timestamptz
language plpgsql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
as $$
declare
    found constant timestamptz := outbox.as_time(name, value, at);
begin
    if found > at then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s lies in the future: it is %s, and the database''s clock says %s', name, found, at);
    end if;
    return found;
end
$$;

-- A filter of deliveries, as outbox.read_filter returns it. Null: not asked for.
create type outbox.delivery_filter as (
    sink text, type_like text, key text, error text, status integer, since timestamptz, until timestamptz, uids uuid[],
    states text[]
);

-- Read a filter: an object with any of sink, type (a pattern with "*"), key, error (a part of it, in any case), status,
-- since and until (when the event was emitted: from, and before), uids and states. All that is given must hold. Times are
-- those of outbox.as_time, ages count from `at`. Without `states` dead ones are meant.
create function outbox.read_filter(filter jsonb, at timestamptz) returns outbox.delivery_filter
language plpgsql stable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    names constant text[] := '{sink, type, key, error, status, since, until, uids, states}';
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
    for name, value in select * from jsonb_each(filter) loop
        given := value #>> '{}';
        fault := case
            when name <> all (names) then
                format('a filter has no field "%s"; it has: %s', left(name, 60), array_to_string(names, ', '))
            when name in ('uids', 'states') and jsonb_typeof(value) <> 'array'
                 or name in ('sink', 'type', 'key', 'error', 'since', 'until') and jsonb_typeof(value) <> 'string'
                 or name = 'status' and jsonb_typeof(value) <> 'number' then
                format('%s of a filter must be %s, not %s', name,
                       case name when 'status' then 'a number' when 'uids' then 'an array' when 'states' then 'an array'
                                 else 'a string' end, jsonb_typeof(value))
            when name = 'type' and (given = '' or given collate "C" ~ '[^\x21-\x7e]' or length(given) > 510) then
                'type of a filter must be a pattern of visible ASCII characters, such as order.*'
            when name = 'key' and octet_length(given) > 1024 then
                'key of a filter must have at most 1024 bytes'
            when name = 'error' and (given = '' or length(given) > 500) then
                'error of a filter must have 1 to 500 characters'
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
            when 'error' then read.error := lower(given);
            when 'status' then read.status := given::integer;
            when 'since' then read.since := outbox.past_time('since', value, at);
            when 'until' then read.until := outbox.as_time('until', value, at);
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

-- Refuse the name of a sink that is not there. The hint names those that are.
create function outbox.require_sink(sink_name text) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if not exists (select from outbox.sink s where s.name = sink_name) then
        raise exception using errcode = 'no_data_found',
            message = format('there is no sink %s', coalesce(quote_literal(left(sink_name, 60)), 'without a name')),
            hint = (select coalesce('There are: ' || string_agg(s.name, ', ' order by s.name), 'There is none.')
                      from outbox.sink s);
    end if;
end
$$;

-- True if a row is one that a filter means; those of replays, whose names begin with "~", are not. One expression,
-- which takes the place of its call when a statement is planned.
create function outbox.is_meant(d outbox.delivery, f outbox.delivery_filter) returns boolean
language sql stable
return case when f.sink is null then d.sink < '~' else d.sink = f.sink end
   and outbox.delivery_state(d.state, d.ordered, d.deliver_at) = any (f.states)
   and (f.type_like is null or d.type like f.type_like)
   and (f.key is null or d.key = f.key)
   and (f.status is null or d.last_status = f.status)
   and (f.since is null or d.created_at >= f.since)
   and (f.until is null or d.created_at < f.until)
   and (f.uids is null or d.uid = any (f.uids))
   and (f.error is null or strpos(lower(d.last_error), f.error) > 0);

-- The deliveries that a filter means, newest event first, without payload and headers: at most `most`, and of those before
-- (`before_id`, `before_sink`) only. `since` is when a row died, or became a row. Of each sink, or of all rows where other
-- states than dead are meant, no more than the newest million are looked at.
create function outbox.deliveries(
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
    f constant outbox.delivery_filter := outbox.read_filter(filter, clock_timestamp());
    top constant bigint := coalesce(before_id, 9223372036854775807);
    wanted constant integer := least(greatest(coalesce(most, 50), 0), 1000);
    ids bigint[];
    sinks text[];
begin
    if f.uids is null and f.states = '{dead}' then
        select array_agg(m.id), array_agg(m.sink) into ids, sinks
          from (
            select k.name as sink, l.id
              from outbox.sink k
             cross join lateral (
                select r.id
                  from (
                    select d.id, outbox.is_meant(d, f) as meant
                      from outbox.delivery d
                     where d.state = 'dead' and d.sink = k.name
                       and d.id <= top and (d.id < top or d.sink < before_sink)
                     order by d.id desc
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
                select d.id, d.sink, outbox.is_meant(d, f) as meant
                  from outbox.delivery d
                 where (f.uids is null or d.uid = any (f.uids))
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

-- Number of deliveries that a filter means: exact up to 10,000, and where no more than a million rows must be looked at.
create function outbox.count_deliveries(filter jsonb, out matched bigint, out exact boolean)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set jit = off
as $$
declare
    most constant integer := 10000;
    most_looks constant integer := 1000000;
    f constant outbox.delivery_filter := outbox.read_filter(filter, clock_timestamp());
    dead_alone constant boolean := f.states = '{dead}';
begin
    select count(*) into matched
      from (
        select from (
            select outbox.is_meant(d, f) as meant
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

-- The deliveries that a filter means by sink, type and kind of error, the largest groups first, at most 1,000 of the newest
-- 100,000 deliveries among the newest million; `exact` is false where there are more of either. The kind of an error is its status, or its text without what
-- differs from event to event: uuids and numbers. `example` is one of the errors. `first` and `last` are as `since` of
-- outbox.deliveries.
create function outbox.delivery_summary(filter jsonb) returns table (
    sink text, type text, state text, error text, status integer, example text, count bigint, first timestamptz,
    last timestamptz, exact boolean
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set standard_conforming_strings = on
set jit = off
as $$
#variable_conflict use_column
declare
    most constant integer := 100000;
    most_groups constant integer := 1000;
    most_looks constant integer := 1000000;
    f constant outbox.delivery_filter := outbox.read_filter(filter, clock_timestamp());
    dead_alone constant boolean := f.states = '{dead}';
begin
    return query
    with newest as materialized (
        select l.sink, l.type, l.state, l.error, l.status, l.at
          from (
            select d.id, d.sink, d.type, outbox.delivery_state(d.state, d.ordered, d.deliver_at) as state,
                   left(d.last_error, 200) as error, d.last_status as status,
                   case when d.state = 'dead' then greatest(d.last_attempt_at, d.since) else d.since end as at,
                   outbox.is_meant(d, f) as meant
              from outbox.delivery d
             where (not dead_alone or d.state = 'dead') and (f.sink is null or d.sink = f.sink)
               and (f.uids is null or d.uid = any (f.uids))
             order by d.id desc
             limit most_looks
          ) l
         where l.meant
         order by l.id desc
         limit most + 1
    ),
    grouped as (
        select n.sink, n.type, n.state, n.status, n.error, count(*) as count, min(n.at) as first, max(n.at) as last
          from newest n
         group by n.sink, n.type, n.state, n.status, n.error
    ),
    classed as (
        select g.*,
               case when g.status is null then
                   regexp_replace(
                       regexp_replace(g.error collate "C", '[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}', '…', 'gi'),
                       '[0-9]+', 'N', 'g')
               end as class
          from grouped g
    )
    select c.sink::text, c.type::text, c.state, c.class, c.status, min(c.error), sum(c.count)::bigint,
           outbox.loadable_time(min(c.first)), outbox.loadable_time(max(c.last)), (select count(*) from newest) <= most
           and not exists (select from outbox.delivery d
                            where (not dead_alone or d.state = 'dead') and (f.sink is null or d.sink = f.sink)
                              and (f.uids is null or d.uid = any (f.uids))
                           offset most_looks)
      from classed c
     group by c.sink, c.type, c.state, c.class, c.status
     order by sum(c.count) desc, c.sink, c.type, c.class, c.status
     limit most_groups;
end
$$;

-- The next rows that an action looks at: at most `most`. Dead ones are looked at sink by sink, in the order of ids; where
-- other states are meant, whatever rows come next in the order of ids; with uids, their rows alone. `next_id` and
-- `next_sink` say where to go on, null behind the last row.
create function outbox.next_deliveries(
    f outbox.delivery_filter, uids uuid[], after_id bigint, after_sink text, most integer,
    out ids bigint[], out sinks text[], out next_id bigint, out next_sink text
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_variable
begin
    if uids is not null then
        select array_agg(n.id), array_agg(n.sink) into ids, sinks
          from (select d.id, d.sink from outbox.delivery d
                 where d.uid = any (uids) and (d.id, d.sink) > (after_id, after_sink)
                 order by d.id, d.sink limit most) n;
    elsif f.states = '{dead}' and f.sink is not null then
        select array_agg(n.id), array_agg(n.sink) into ids, sinks
          from (select d.id, d.sink from outbox.delivery d
                 where d.state = 'dead' and d.sink = f.sink and d.id > after_id
                 order by d.id limit most) n;
    elsif f.states = '{dead}' then
        select array_agg(n.id), array_agg(n.sink) into ids, sinks
          from (select d.id, d.sink from outbox.delivery d
                 where d.state = 'dead' and (d.sink, d.id) > (after_sink, after_id)
                 order by d.sink, d.id limit most) n;
    else
        select array_agg(n.id), array_agg(n.sink) into ids, sinks
          from (select d.id, d.sink from outbox.delivery d
                 where (d.id, d.sink) > (after_id, after_sink)
                 order by d.id, d.sink limit most) n;
    end if;
    if cardinality(ids) = most then
        next_id := ids[most];
        next_sink := sinks[most];
    end if;
end
$$;

-- True if a row was there when the action began, and has not failed since: what is retried and dies again is left.
-- Times ahead of the clock are those of a clock that went back. A discard follows a row through its attempts.
create function outbox.was_before(d outbox.delivery, began timestamptz, discards boolean) returns boolean
language sql volatile
return (d.since < began or d.since > clock_timestamp())
   and (d.last_attempt_at is null or d.last_attempt_at < began or d.last_attempt_at > clock_timestamp()
        or (discards and d.state <> 'dead'));

-- One step of a retry: deliveries that `filter` means, which may be dead and waiting ones, are due now, and their attempts
-- begin again. At most `most` rows behind (`after_id`, `after_sink`) are looked at, and `most_done` of them retried;
-- `next_id` and `next_sink` are where the next step continues, null behind the last one. The first step records the
-- action and returns its number, which the others are given. It retries what was in its state when the first step
-- began, so what dies again is not retried endlessly.
--
-- Rows of a key are retried in the order of ids, and claimed in it. Rows that are being delivered, and those that another
-- session has locked, are left and counted as `under_way`. `unsettled` is for outbox.discard_deliveries, and 0.
--
-- Rows that are due count for `parked_max`, and later ones of their keys wait behind them. So a step retries nothing and
-- says `is_full` while a sink of its rows has `most_due` that are due: they are to be delivered first. `due_mark` changes
-- when some of these are.
create function outbox.retry_deliveries(
    filter jsonb, after_id bigint default 0, after_sink text default '', most integer default 1000,
    most_done integer default 1000, most_due integer default 1000, actor text default null,
    reason text default null, inout audit_id bigint default null,
    out done bigint, out under_way bigint, out unsettled bigint, out next_id bigint, out next_sink text, out is_full boolean,
    out due_mark bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set lock_timeout = '2s'
as $$
declare
    f outbox.delivery_filter;
    began timestamptz;
    looked_at bigint[];
    sinks text[];
    free_ids bigint[];
    free_sinks text[];
begin
    audit_id := outbox.record_action('dead retry', filter ->> 'sink', filter, 0, actor, reason, audit_id);
    select a.at into began from outbox.audit a where a.id = audit_id;
    f := outbox.read_filter(filter, began);
    if not f.states <@ '{dead, waiting}' then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('dead and waiting deliveries can be retried, not %s ones: a held one follows the event before '
                             'it, and a scheduled one is due at its time',
                             (select string_agg(s, ' or ' order by s) from unnest(f.states) s
                               where s not in ('dead', 'waiting')));
    end if;
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    most_done := least(greatest(coalesce(most_done, most), 1), most);
    most_due := least(greatest(coalesce(most_due, 1000), 1), 10000);
    select n.ids, n.sinks, n.next_id, n.next_sink into looked_at, sinks, next_id, next_sink
      from outbox.next_deliveries(f, f.uids, coalesce(after_id, 0), coalesce(after_sink, ''), most) n;
    done := 0;
    under_way := 0;
    unsettled := 0;
    select sum(r.mark) filter (where r.due >= most_due) into due_mark
      from (select distinct s.sink from unnest(sinks) s (sink)) k
     cross join lateral (
        select count(*) as due, sum(w.id % 1000003)::bigint as mark
          from (
            select d.id from outbox.delivery d
             where d.sink = k.sink and d.state = 'waiting' and d.due_at <= now()
             order by d.due_at, d.id
             limit most_due
          ) w
     ) r;
    is_full := due_mark is not null;
    if is_full then
        next_id := coalesce(after_id, 0);
        next_sink := coalesce(after_sink, '');
        return;
    end if;
    select array_agg(l.id), array_agg(l.sink) into free_ids, free_sinks
      from (
        select d.id, d.sink
          from unnest(looked_at, sinks) with ordinality w (id, sink, place)
          join outbox.delivery d on d.id = w.id and d.sink = w.sink
         where outbox.is_meant(d, f) and outbox.was_before(d, began, false)
           and (d.lease_until is null or d.lease_until <= clock_timestamp())
         order by w.place
         limit most_done
           for update of d skip locked
      ) l;
    done := coalesce(cardinality(free_ids), 0);
    if done = most_done then
        next_id := free_ids[done];
        next_sink := free_sinks[done];
    end if;
    -- Those that are left, up to where the next step begins.
    select count(*) into under_way
      from unnest(looked_at, sinks) with ordinality w (id, sink, place)
      join outbox.delivery d on d.id = w.id and d.sink = w.sink
     where outbox.is_meant(d, f) and outbox.was_before(d, began, false)
       and (done < most_done
            or w.place < (select p.place from unnest(looked_at, sinks) with ordinality p (id, sink, place)
                           where p.id = next_id and p.sink = next_sink));
    under_way := under_way - case when done < most_done then done else done - 1 end;
    -- A waiting row whose lease lapsed may have ended the process that had it: its claims stay counted.
    update outbox.delivery d
       set state = 'waiting', due_at = clock_timestamp(), since = clock_timestamp(), attempts = 0,
           claims = case when d.state = 'dead' or (d.owner is null and not d.suspect) then 0 else d.claims end,
           lease = null, lease_until = null, owner = null,
           last_error = null, last_status = null, last_attempt = null,
           last_attempt_at = coalesce(d.last_attempt_at, d.since)  -- it was tried before: its delivery is recorded
      from unnest(free_ids, free_sinks) w (id, sink)
     where d.id = w.id and d.sink = w.sink;
    perform outbox.record_action('dead retry', filter ->> 'sink', filter, done, actor, reason, audit_id);
end
$$;

-- Lock the shards of these rows, so that none is claimed, and no position set back, until the transaction ends.
create function outbox.lock_shards_of(ids bigint[], sinks text[]) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
begin
    perform from (
        select distinct d.sink, d.shard
          from unnest(ids, sinks) w (id, sink)
          join outbox.delivery d on d.id = w.id and d.sink = w.sink
    ) c
       join outbox.shard s on s.sink = c.sink and s.shard = c.shard
      order by s.sink, s.shard
        for share of s;
end
$$;

-- Delete rows, with a mark for each under the id that the log has, and return how many. To be called with the rows and their
-- shards locked. A row goes only when the position of its shard has passed its event, written under the shard's newest epoch,
-- or when the log no longer has the event: else a session that begins at that position would read the event and deliver it.
-- The others are `unsettled`.
create function outbox.discard_rows(
    ids bigint[], sinks text[], actor text, reason text,
    out done bigint, out unsettled bigint, out unsettled_uids uuid[]
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_variable
declare
    numbering_floor constant bigint := (select m.floor from outbox.meta m);
begin
    with standing as materialized (
        select n.* from outbox.standing n
          join outbox.shard s on s.sink = n.sink and s.shard = n.shard and s.epoch = n.epoch
         where n.sink = any (sinks)
    ),
    logged as materialized (
        select d.sink, d.id, d.uid, e.id as log_id, e.xid, d.shard
          from unnest(ids, sinks) w (id, sink)
          join outbox.delivery d on d.id = w.id and d.sink = w.sink
          left join lateral (
            select l.id, l.xid from outbox.event l
             where l.uid = d.uid and l.created_at = d.created_at
             order by l.id + 0 desc limit 1  -- an expression: the index on the id is not for this
          ) e on true
    ),
    judged as materialized (
        select l.sink, l.id, l.uid, coalesce(l.log_id, l.id) as mark_id,
               l.log_id is null or exists (
                    select from standing n
                     where n.sink = l.sink and n.shard = l.shard
                       and outbox.position_passed(l.log_id, l.xid, n.a_seq, n.a_snapshot, n.a_next, n.b_snapshot, n.last_id,
                                                  numbering_floor)) as passed
          from logged l
    ),
    gone as (
        delete from outbox.delivery d using judged j where j.passed and d.id = j.id and d.sink = j.sink
        returning d.sink, j.mark_id, d.uid
    ),
    marked as (
        insert into outbox.discarded (sink, id, uid, actor, reason)
        select g.sink, g.mark_id, g.uid, actor, reason from gone g
            on conflict (sink, id) do update
           set uid = excluded.uid, at = excluded.at, role_name = excluded.role_name, actor = excluded.actor,
               reason = excluded.reason
    )
    select (select count(*) from gone), count(*) filter (where not j.passed), array_agg(j.uid) filter (where not j.passed)
      into done, unsettled, unsettled_uids
      from judged j;
end
$$;

-- One step of a discard, as outbox.retry_deliveries: deliveries that `filter` means, of any state, are deleted, and
-- outbox.discarded says so. Later events of their keys go on. With `among`, no other uids than these are looked at.
--
-- Rows whose events would be read again (see outbox.discard_rows) are left and counted as `unsettled`; `unsettled_uids` names
-- them. The shards are locked before the positions are read. Relays cannot renew their leases meanwhile: call it in a
-- transaction of its own. Tables are locked in the order in which outbox.rebase locks them.
create function outbox.discard_deliveries(
    filter jsonb, after_id bigint default 0, after_sink text default '', most integer default 1000,
    among uuid[] default null, actor text default null, reason text default null, inout audit_id bigint default null,
    out done bigint, out under_way bigint, out unsettled bigint, out next_id bigint, out next_sink text,
    out unsettled_uids uuid[]
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set lock_timeout = '2s'
as $$
declare
    f outbox.delivery_filter;
    began timestamptz;
    looked_at bigint[];
    sinks text[];
    free_ids bigint[];
    free_sinks text[];
begin
    perform outbox.end_when_idle();
    perform outbox.require_read_committed('outbox.discard_deliveries');
    if coalesce(trim(reason), '') = '' then
        raise exception using errcode = 'invalid_parameter_value', message = 'a discard needs a reason';
    end if;
    lock table outbox.event, outbox.sink, outbox.shard, outbox.progress in access share mode;
    audit_id := outbox.record_action('dead discard', filter ->> 'sink', filter, 0, actor, reason, audit_id);
    select a.at into began from outbox.audit a where a.id = audit_id;
    f := outbox.read_filter(filter, began);
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    select n.ids, n.sinks, n.next_id, n.next_sink into looked_at, sinks, next_id, next_sink
      from outbox.next_deliveries(f, coalesce(among, f.uids), coalesce(after_id, 0), coalesce(after_sink, ''), most) n;
    perform outbox.lock_shards_of(array_agg(d.id), array_agg(d.sink))
       from unnest(looked_at, sinks) w (id, sink)
       join outbox.delivery d on d.id = w.id and d.sink = w.sink
      where outbox.is_meant(d, f);
    select array_agg(l.id), array_agg(l.sink) into free_ids, free_sinks
      from (
        select d.id, d.sink
          from unnest(looked_at, sinks) w (id, sink)
          join outbox.delivery d on d.id = w.id and d.sink = w.sink
         where outbox.is_meant(d, f) and outbox.was_before(d, began, true)
           and (d.lease_until is null or d.lease_until <= clock_timestamp())
         order by d.sink, d.id
           for update of d skip locked
      ) l;
    select r.done, r.unsettled, r.unsettled_uids into done, unsettled, unsettled_uids
      from outbox.discard_rows(free_ids, free_sinks, actor, reason) r;
    select count(*) into under_way
      from unnest(looked_at, sinks) w (id, sink)
      join outbox.delivery d on d.id = w.id and d.sink = w.sink
     where outbox.is_meant(d, f) and outbox.was_before(d, began, true);
    under_way := under_way - unsettled;
    perform outbox.record_action('dead discard', filter ->> 'sink', filter, done, actor, reason, audit_id);
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Pauses
-- ---------------------------------------------------------------------------------------------------------

-- Pause or resume a sink, which relays check once a second, and return whether that changed it. For a resumed sink, the
-- time that its destination was down before does not count towards the next pause. The trigger below records it.
create function outbox.set_paused(
    sink_name text, paused boolean, actor text default null, reason text default null
) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    changed boolean;
begin
    if paused is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'paused must be true or false, not null';
    end if;
    if octet_length(reason) > 2000 then
        raise exception using errcode = 'invalid_parameter_value', message = 'reason must have at most 2000 bytes';
    end if;
    perform outbox.require_sink(sink_name);
    reason := nullif(trim(reason), '');
    perform set_config('outbox.actor', coalesce(actor, ''), true), set_config('outbox.reason', coalesce(reason, ''), true);
    update outbox.sink k
       set paused = set_paused.paused, paused_reason = case when set_paused.paused then reason end,
           circuit_since = case when set_paused.paused then k.circuit_since end
     where k.name = sink_name and k.paused <> set_paused.paused;
    changed := found;
    perform set_config('outbox.actor', '', true), set_config('outbox.reason', '', true);
    return changed;
end
$$;

-- Record every pause and resumption: by a person through outbox.set_paused, a relay whose destination is gone or
-- was down for too long, or a statement written by hand.
create function outbox.sink_paused() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox.record_action(
        case when new.paused then 'pause' else 'resume' end, new.name, null, 1,
        nullif(current_setting('outbox.actor', true), ''),
        outbox.short_text(coalesce(nullif(current_setting('outbox.reason', true), ''), new.paused_reason), 2000));
    return null;
end
$$;

create trigger sink_paused after update of paused on outbox.sink
for each row when (old.paused <> new.paused) execute function outbox.sink_paused();

-- ---------------------------------------------------------------------------------------------------------
-- Rights
-- ---------------------------------------------------------------------------------------------------------

-- A number of rows or events that a caller wants to have counted; null: 10,000.
create function outbox.bounded_count(most integer) returns integer
language sql immutable
return least(greatest(coalesce(most, 10000), 0), 100000);

-- The seconds that a caller is ready to wait for a count; null: 5.
create function outbox.bounded_seconds(seconds double precision) returns double precision
language sql immutable
return least(greatest(coalesce(seconds, 5), 0), 60);

alter function outbox.backlog(text, text[], integer, double precision) rename to count_backlog;

-- As outbox.count_backlog, within bounds. It reads payloads to count the bytes of what it reads, which roles that may see
-- `status` cannot.
create function outbox.backlog(
    sink_name text, types text[], most integer, most_seconds double precision,
    out events bigint, out exact boolean, out scheduled bigint, out oldest timestamptz
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select b.events, b.exact, b.scheduled, b.oldest
      from outbox.count_backlog(sink_name, types, outbox.bounded_count(most), outbox.bounded_seconds(most_seconds)) b
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Errors that are over, ticks without rights, and marks after a restore
-- ---------------------------------------------------------------------------------------------------------

alter table outbox.sink add column last_error_mended_at timestamptz;
comment on column outbox.sink.last_error_mended_at is
    'When a relay found the last error to be over; older than last_error_at if an error came since.';

create or replace function outbox.tick(
    out seq bigint, out snapshot pg_snapshot, out next_xid bigint, out incarnation text, out wal bigint,
    out now timestamptz, out generations bigint
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    xmax bigint;
    home bigint;
begin
    if pg_current_xact_id_if_assigned() is not null then
        raise exception 'outbox.tick must be a transaction of its own';
    end if;
    -- Not `last_value` of the relation: nextval() stores a value 32 ahead there while it writes its WAL record, and a
    -- query can see it. Ids up to a tick's sequence value that are given out after the tick would never be read.
    seq := pg_sequence_last_value('outbox.event_id_seq');
    if seq is null then
        -- The function also returns null without the privilege (PostgreSQL 18), which this statement refuses.
        perform from outbox.event_id_seq;
        seq := 0;
    end if;
    snapshot := pg_current_snapshot();
    xmax := pg_snapshot_xmax(snapshot)::text::bigint;
    next_xid := xmax + (((3 + age('3'::xid)::bigint) - xmax) & 4294967295);
    -- After the snapshot: who sees the old value has a tick from before the change, so no window of an older
    -- configuration ends behind it and passes by events that only the newer one routes.
    select m.config, m.system_identifier into generations, home from outbox.meta m;
    if home is distinct from (select c.system_identifier from pg_control_system() c) then
        raise exception 'the log comes from another cluster, as after a restore, a move or pg_upgrade: '
            'stop every relay, then run outbox-relay rebase' using errcode = 'OR002';
    end if;
    wal := pg_current_wal_lsn() - '0/0'::pg_lsn;
    now := clock_timestamp();
    incarnation := outbox.incarnation();
    if not has_sequence_privilege('outbox.server_mark', 'select') then
        -- The mark is missing from the incarnation (PostgreSQL 18), so that a crash of the server would not show.
        perform from outbox.server_mark;
    end if;
end
$$;

-- Marks of discarded events follow them to their new ids.
create or replace function outbox.renumber(upto_id bigint, highest bigint) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    renumbered bigint;
begin
    with moved as (
        update outbox.event e
           set id = highest + n.place
          from (
            select l.tableoid as part, l.ctid as row_id, l.id as old_id,
                   row_number() over (order by l.id, l.created_at) as place
              from outbox.event l
             where l.id <= upto_id
               and ((l.xmin::text::bigint - (l.xid::text::bigint & 4294967295)) & 4294967295) < 2147483648
          ) n
         where e.tableoid = n.part and e.ctid = n.row_id
        returning e.uid, n.old_id, e.id
    ),
    marks as (
        update outbox.discarded m set id = v.id from moved v where m.uid = v.uid and m.id = v.old_id
    )
    select count(*) into renumbered from moved;
    return renumbered;
end
$$;
