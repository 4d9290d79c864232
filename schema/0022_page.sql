-- Probes on request, filters by the kind of an error and as of a time, and a key for links of the page. Relays made for
-- version 2 work on this schema: they do not see requests for probes.

-- ---------------------------------------------------------------------------------------------------------
-- Probes
-- ---------------------------------------------------------------------------------------------------------

alter table outbox.sink add column probes bigint not null default 0;
comment on column outbox.sink.probes is 'Number of requests by people to probe the destination now. Relays compare it once a second.';

-- Have every relay whose circuit of this sink is open send its next event now, and not at the end of its pause. Returns
-- null, or the reason why there is nothing to probe: the sink is `paused`, or its circuit is `closed`, as relays report it.
create function outbox.probe_sink(sink_name text, actor text default null, reason text default null) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    obstacle text;
begin
    perform outbox.require_sink(sink_name);
    update outbox.sink k set probes = k.probes + 1
     where k.name = sink_name and k.circuit <> 'closed' and not k.paused;
    if found then
        perform outbox.record_action('sinks probe', sink_name, null, 1, actor, nullif(trim(reason), ''));
        return null;
    end if;
    select case when k.paused then 'paused' else 'closed' end into obstacle from outbox.sink k where k.name = sink_name;
    return obstacle;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Filters
-- ---------------------------------------------------------------------------------------------------------

alter type outbox.delivery_filter add attribute kind text, add attribute as_of timestamptz;

-- The kind of an error without a status, as outbox.delivery_summary groups them: its first 200 characters without what
-- differs from event to event, which are uuids and numbers. Empty: there is no error.
create function outbox.error_kind(error text) returns text
language sql immutable
return coalesce(
    regexp_replace(
        regexp_replace(left(error, 200) collate "C", '[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}', '…', 'gi'),
        '[0-9]+', 'N', 'g'),
    '');

-- As in version 3, and with two fields more. `kind` is that of an error without a status (see outbox.error_kind). With
-- `as_of`, ages count from this time, and rows that came, died or failed later are not meant: an action that gets it does
-- not go beyond what was counted then.
create or replace function outbox.read_filter(filter jsonb, at timestamptz) returns outbox.delivery_filter
language plpgsql stable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    names constant text[] := '{sink, type, key, error, kind, status, since, until, as_of, uids, states}';
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
                 or name in ('sink', 'type', 'key', 'error', 'kind', 'since', 'until', 'as_of')
                    and jsonb_typeof(value) <> 'string'
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

-- True if a row was in the queue, and in the state that it is in, at the time `as_of`. Times ahead of the clock are those of
-- a clock that went back, as in outbox.was_before. A row that is still to be delivered and has failed since is the one that
-- was there, but it had not its present error, which counts `by_error`. Without `scheduled`, a row that was scheduled then
-- was in another state.
create function outbox.was_counted(
    state text, ordered boolean, deliver_at timestamptz, since timestamptz, last_attempt_at timestamptz,
    as_of timestamptz, by_error boolean, scheduled boolean
) returns boolean
language sql stable
return (since < as_of or since > statement_timestamp())
   and (last_attempt_at is null or last_attempt_at < as_of or last_attempt_at > statement_timestamp()
        or (state <> 'dead' and not by_error))
   and (scheduled or state <> 'waiting' or ordered or deliver_at is null or deliver_at <= as_of);

-- As in version 3, with the new fields. An error is searched for its kind only if it begins as the kind does. ASCII characters are searched for without the rules of a language, which take most
-- of the time among a million long errors.
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
            and outbox.error_kind(d.last_error) = f.kind));

-- As in version 3, except for the ways in which dead rows are found. Those of one sink, and the newest of each sink, are
-- walked through in their own index: a sink that is equal to a name needs no order, so the primary key, which has the order
-- of ids, took its place, and was read from end to end for each sink. Those of all sinks that more is asked of are walked
-- through once, in the order of ids, which is about that of the table: no more than the newest million of all.
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
    f constant outbox.delivery_filter := outbox.read_filter(filter, clock_timestamp());
    dead_alone constant boolean := f.states = '{dead}';
    top constant bigint := coalesce(before_id, 9223372036854775807);
    wanted constant integer := least(greatest(coalesce(most, 50), 0), 1000);
    ids bigint[];
    sinks text[];
begin
    if f.uids is null and dead_alone
       and (f.sink is not null
            or (f.type_like is null and f.key is null and f.error is null and f.kind is null and f.status is null
                and f.since is null and f.until is null and f.as_of is null)) then
        select array_agg(m.id), array_agg(m.sink) into ids, sinks
          from (
            select k.name as sink, l.id
              from outbox.sink k
             cross join lateral (
                select r.id
                  from (
                    select d.id, outbox.is_meant(d, f) as meant
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
                select d.id, d.sink, outbox.is_meant(d, f) as meant
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

-- As in version 3. An error without any text counts as none, and the kind of an error is that of outbox.error_kind. Only
-- rows that are meant are sorted, and without a condition the newest are walked through.
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
    f constant outbox.delivery_filter := outbox.read_filter(filter, clock_timestamp());
    dead_alone constant boolean := f.states = '{dead}';
    unfiltered constant boolean := dead_alone and f.uids is null and f.type_like is null and f.key is null
        and f.error is null and f.kind is null and f.status is null and f.since is null and f.until is null and f.as_of is null;
    more boolean;
    first_id bigint;
begin
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
           and case when unfiltered then d.sink < '~' else outbox.is_meant(d, f) end
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
           outbox.loadable_time(min(c.first)), outbox.loadable_time(max(c.last)), (select count(*) from newest) <= most and not more
      from classed c
     group by c.sink, c.type, c.state, c.class, c.status
     order by sum(c.count) desc, c.sink, c.type, c.class, c.status
     limit most_groups;
end
$$;

-- As in version 9, and in the kind of an error too, where numbers of the key are not as they were.
create or replace function outbox.erase_in_audit(key text, by_actor text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    hash constant text := outbox.keyed_hash(key);
    subject constant jsonb := outbox.filter_of_subject(key, null);
    in_kind constant text := outbox.error_kind(key);
    word constant text := '(?<![[:alnum:]_])' || regexp_replace(key collate "C", '([!-/:-@[-`{-~])', '\\\1', 'g')
                          || '(?![[:alnum:]_])';
    kind_word constant text := '(?<![[:alnum:]_])' || regexp_replace(in_kind collate "C", '([!-/:-@[-`{-~])', '\\\1', 'g')
                               || '(?![[:alnum:]_])';
    changed bigint[];
begin
    if length(key) < 4 or not exists (select from outbox.audit a
                                       where a.action = 'erase' and a.filter = outbox.hashed_filter(subject) and a.count > 0) then
        return;
    end if;
    with quoting as (
        update outbox.audit a
           set reason = regexp_replace(a.reason collate "C", word, hash, 'g'),
               filter = a.filter
                        || case when a.filter ? 'error'
                                then jsonb_build_object('error', regexp_replace((a.filter ->> 'error') collate "C",
                                                                                word, hash, 'g'))
                                else '{}' end
                        || case when a.filter ? 'kind' and length(in_kind) >= 4
                                then jsonb_build_object('kind', regexp_replace((a.filter ->> 'kind') collate "C",
                                                                               kind_word, hash, 'g'))
                                else '{}' end
         where (strpos(a.reason, key) > 0 and a.reason collate "C" ~ word)
            or (strpos(a.filter ->> 'error', key) > 0 and (a.filter ->> 'error') collate "C" ~ word)
            or (length(in_kind) >= 4 and strpos(a.filter ->> 'kind', in_kind) > 0
                and (a.filter ->> 'kind') collate "C" ~ kind_word)
        returning a.id
    )
    select array_agg(q.id order by q.id) into changed from quoting q;
    if changed is not null then
        perform outbox.record_action('erase in audit', null, subject || jsonb_build_object('rows', to_jsonb(changed[1:100])),
                                     cardinality(changed), by_actor, null);
    end if;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Links
-- ---------------------------------------------------------------------------------------------------------

-- The page's links contain an HMAC of a key of events under this one. Roles that can read it can read the keys themselves.
create table outbox.page_key (
    single boolean primary key default true check (single),
    key bytea not null
);
insert into outbox.page_key (key)
values (decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));
comment on table outbox.page_key is 'The secret of the hashes of keys in links of the page, which all its processes share.';
