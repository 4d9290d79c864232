-- Filters refuse an end in the future, and unique keys are free within a second while few are in use. Relays of earlier versions
-- work on this schema.

-- As in version 25. `until` must not lie in the future either: a mistyped year would select everything.
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
            when 'until' then read.until := outbox.past_time('until', value, at);
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

-- As in version 21: delete unique keys whose event is done, among at most `most` that are to be looked at, and return how many
-- were deleted. An event that is not done is looked at again in a second. If more than 100 are to be looked at, the next look is
-- in a twentieth of its age if that is longer, up to half a minute, so that a call costs about as much however many keys are in
-- use. One that is scheduled for later is looked at when it is due, and at least once an hour.
create or replace function outbox.finish_unique_keys(most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
declare
    few constant integer := 100;
    uids uuid[];
    done uuid[];
    late uuid[];
    look_times timestamptz[];
    free integer;
    finished integer;
begin
    most := least(greatest(coalesce(most, 500), 1), 1000);
    -- Keys that were locked and got no event.
    delete from outbox.unique_key k
     where k.ctid = any (array(select l.ctid from outbox.unique_key l
                                where l.uid is null and l.look_at <= clock_timestamp() limit most for update skip locked));
    get diagnostics free = row_count;
    -- Positions that were stored in another cluster do not tell which transactions of this one they have passed: see outbox.tick.
    if (select m.system_identifier from outbox.meta m) is distinct from (select c.system_identifier from pg_control_system() c) then
        return free;
    end if;
    uids := array(select k.uid from outbox.unique_key k
                   where k.look_at <= clock_timestamp() and k.uid is not null order by k.look_at limit most);
    if cardinality(uids) = 0 then
        return free;
    end if;
    with keys as materialized (
        select k.uid, k.claimed_at from outbox.unique_key k where k.uid = any (uids)
    ),
    logged as materialized (
        select k.uid, k.claimed_at, e.id, e.xid, e.shard, e.type, coalesce(c.deliver_at, e.deliver_at) as due
          from keys k
          left join lateral (
            select l.id, l.xid, l.shard, l.type, l.deliver_at
              from outbox.event l
             where l.uid = k.uid and l.created_at >= k.claimed_at - interval '1 day'
             order by l.id + 0 desc limit 1
          ) e on true
          left join lateral (
            select s.deliver_at from outbox.scheduled_change s where s.uid = k.uid limit 1
          ) c on true
    ),
    readers as materialized (
        select k.name, k.created_at, l.shard, outbox.types_of(k.name) as types, m.floor, p.a_seq,
               p.a_snapshot, p.a_next, p.b_snapshot, p.last_id,
               -- A session that still reads with other patterns.
               coalesce(h.owner is not null and h.lease_until > clock_timestamp() and h.generation is distinct from k.generation,
                        false) as differs,
               p.a_seq is not null and (h.owner is null or p.epoch = h.epoch) as counts
          from outbox.sink k
         cross join outbox.meta m
         cross join (select distinct l.shard from logged l where l.shard is not null) l
          left join outbox.shard h on h.sink = k.name and h.shard = l.shard
          left join outbox.standing p on p.sink = k.name and p.shard = l.shard
    ),
    judged as (
        select l.uid, l.claimed_at, l.due,
               not exists (
                    select from outbox.delivery d join outbox.sink k on k.name = d.sink
                     where d.uid = l.uid and d.state <> 'dead' and k.created_at <= l.claimed_at)
               and not exists (
                    select from readers r
                     where r.shard = l.shard and r.created_at <= l.claimed_at
                       and (r.differs or r.types is null or l.type like any (r.types))
                       and not (r.counts and outbox.position_passed(l.id, l.xid, r.a_seq, r.a_snapshot, r.a_next, r.b_snapshot,
                                                                    r.last_id, r.floor))
                       and not exists (
                            select from outbox.delivery d
                             where d.uid = l.uid and (d.sink = r.name) is true)) as done  -- not by its primary key
          from logged l
    )
    select array_agg(j.uid) filter (where j.done), array_agg(j.uid) filter (where not j.done),
           array_agg(clock_timestamp()
                     + greatest(interval '1 second',
                                case when cardinality(uids) > few then
                                    least((clock_timestamp() - j.claimed_at) / 20, interval '30 seconds')
                                end,
                                case when j.due is not null then least(j.due - clock_timestamp(), interval '1 hour') end))
               filter (where not j.done)
      into done, late, look_times
      from judged j;
    delete from outbox.unique_key k
     where k.ctid = any (array(select l.ctid from outbox.unique_key l where l.uid = any (done) for update skip locked));
    get diagnostics finished = row_count;
    update outbox.unique_key k set look_at = n.look_at
      from (
        select l.uid, w.look_at
          from unnest(late, look_times) w (uid, look_at)
          join outbox.unique_key l on l.uid = w.uid
           for update of l skip locked
      ) n
     where k.uid = n.uid;
    return free + finished;
end
$$;
