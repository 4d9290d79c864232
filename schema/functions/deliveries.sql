-- The deliveries that a filter means, newest event first, without payload and headers: at most `most`, and of those before
-- (`before_id`, `before_sink`) only. `since` is when a row died, or became a row. Of each sink, or of all rows where other
-- states than dead are meant, no more than the newest million are looked at.
create or replace function outbox.deliveries(
    filter jsonb, most integer default 50, before_id bigint default null, before_sink text default null
) returns table (
    id bigint, uid uuid, sink text, type text, key text, state text, attempts integer, error text, status integer,
    since timestamptz, due_at timestamptz, created_at timestamptz
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
    (select d.id, d.uid, d.sink::text, d.type::text, d.key::text, d.state, d.attempts, d.last_error, d.last_status,
           outbox_internal.loadable_time(case when d.state = 'dead' then greatest(d.last_attempt_at, d.since) else d.since end),
           case when d.state <> 'dead' then outbox_internal.loadable_time(d.due_at) end, outbox_internal.loadable_time(d.created_at)
      from outbox_internal.find_deliveries(filter, before_id, before_sink, 1000000,
                                           least(greatest(coalesce(most, 50), 0), 1000), false) f
      join outbox.delivery d on d.id = f.id and d.sink = f.sink)
    union all
    (select s.id, s.uid, s.sink, s.type, s.key, 'scheduled', 0, null, null, s.created_at, s.deliver_at, s.created_at
       from outbox_internal.scheduled_deliveries(outbox_internal.read_filter(filter, clock_timestamp())) s
      where before_id is null or s.id <= before_id and (s.id < before_id or s.sink < before_sink)
      order by s.id desc, s.sink desc
      limit least(greatest(coalesce(most, 50), 0), 1000))
     order by 1 desc, 3 desc
     limit least(greatest(coalesce(most, 50), 0), 1000)
$$;

-- The rows that a filter means, of those before (`before_id`, `before_sink`), newest event first: at most `most`. The newest
-- `looks` rows of each sink are looked at if dead ones are meant, else of all sinks. With `all_looks`, all of these are, and
-- there is always a row: `matched` are those found, and (`floor`, `floor_sink`) is the place to which the search came, where
-- it can go on; 0: it came to the end. Without, the search ends as soon as it has `most` rows.
--
-- Dead rows are walked through in their own index, sink by sink. A sink that is equal to a name needs no order, so the primary
-- key, which has the order of ids, would take the place of that index, and be read from end to end for each sink.
create or replace function outbox_internal.find_deliveries(
    filter jsonb, before_id bigint, before_sink text, looks integer, most integer, all_looks boolean
) returns table (id bigint, sink text, matched bigint, floor bigint, floor_sink text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set jit = off
as $$
#variable_conflict use_column
declare
    f constant outbox.delivery_filter := outbox_internal.read_filter(filter, clock_timestamp());
    dead_alone constant boolean := f.states = '{dead}';
    by_sink constant boolean := dead_alone and f.uids is null;
    top constant bigint := coalesce(before_id, 9223372036854775807);
begin
    looks := greatest(coalesce(looks, 0), 0);
    most := greatest(coalesce(most, 0), 0);
    return query
    with looked as materialized (
        select l.id, l.sink, l.meant, l.is_last
          from outbox.sink k
         cross join lateral (
            select r.id, r.sink, r.meant, r.place = looks as is_last
              from (
                select d.id, d.sink, outbox_internal.is_meant(d, f) as meant,
                       row_number() over (order by d.sink desc, d.id desc) as place
                  from outbox.delivery d
                 where d.state = 'dead' and d.sink between k.name and k.name
                   and d.id <= top and (d.id < top or d.sink < before_sink)
                 order by d.sink desc, d.id desc
                 limit looks
              ) r
             where r.meant or r.place = looks
             limit case when not all_looks then most end
         ) l
         where by_sink and (f.sink is null or k.name = f.sink)
        union all
        select l.id, l.sink, l.meant, l.is_last
          from (
            select r.id, r.sink, r.meant, r.place = looks as is_last
              from (
                select d.id, d.sink, outbox_internal.is_meant(d, f) as meant,
                       row_number() over (order by d.id desc, d.sink desc) as place
                  from outbox.delivery d
                 where not by_sink and f.states <> '{scheduled}' and (not dead_alone or d.state = 'dead') and (f.uids is null or d.uid = any (f.uids))
                   and d.id <= top and (d.id < top or d.sink < before_sink)
                 order by d.id desc, d.sink desc
                 limit looks
              ) r
             where r.meant or r.place = looks
             limit case when not all_looks then most end
          ) l
    ),
    reached as (
        select coalesce(max(l.id) filter (where l.is_last and all_looks), 0) as floor,
               coalesce(max(l.sink) filter (where l.is_last and not by_sink), '') as floor_sink
          from looked l
    ),
    found as materialized (
        select l.id, l.sink from looked l cross join reached r where l.meant and l.id >= r.floor
    )
    select n.id, n.sink::text, (select count(*) from found), r.floor, r.floor_sink::text
      from reached r
      left join (select w.id, w.sink from found w order by w.id desc, w.sink desc limit most) n on true
     where all_looks or n.id is not null
     order by n.id desc, n.sink desc;
end
$$;
comment on function outbox.deliveries is
    'The deliveries that a filter means, newest event first, without payload and headers.';

-- The deliveries that a filter means by sink, type and kind of error, the largest groups first, at most 1,000 of the newest
-- 100,000 deliveries among the newest million; `exact` is false where there are more of either. The kind of an error is its
-- status, or that of outbox_internal.error_kind. `example` is one of the errors. `first` and `last` are as `since` of
-- outbox.deliveries. Only rows that are meant are sorted, and without a condition the newest are walked through.
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
    f constant outbox.delivery_filter := outbox_internal.read_filter(filter, clock_timestamp());
    dead_alone constant boolean := f.states = '{dead}';
    more boolean;
    first_id bigint;
begin
    if f.states = '{scheduled}' then
        return query
        select s.sink, s.type, 'scheduled', null::text, null::integer, null::text, count(*), min(s.created_at),
               max(s.created_at), true
          from outbox_internal.scheduled_deliveries(f) s
         group by s.sink, s.type
         order by count(*) desc, s.sink, s.type
         limit most_groups;
        return;
    end if;
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
        select d.sink, d.type, d.state as state,
               left(d.last_error, 200) as error, d.last_status as status,
               case when d.state = 'dead' then greatest(d.last_attempt_at, d.since) else d.since end as at
          from outbox.delivery d
         where (not dead_alone or d.state = 'dead') and (f.sink is null or d.sink = f.sink)
           and (f.uids is null or d.uid = any (f.uids))
           and (first_id is null or d.id >= first_id)
           and outbox_internal.is_meant(d, f)
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
               case when g.status is null then nullif(outbox_internal.error_kind(g.error), '') end as class
          from grouped g
    )
    select c.sink::text, c.type::text, c.state, c.class, c.status, min(c.error), sum(c.count)::bigint,
           outbox_internal.loadable_time(min(c.first)), outbox_internal.loadable_time(max(c.last)), (select count(*) from newest) <= most
           and not more
      from classed c
     group by c.sink, c.type, c.state, c.class, c.status
     order by sum(c.count) desc, c.sink, c.type, c.class, c.status
     limit most_groups;
end
$$;
comment on function outbox.delivery_summary is
    'The deliveries that a filter means, by sink, type and kind of error, the largest groups first.';

-- Number of deliveries that a filter means: exact up to 10,000, and where no more than a million rows must be looked at.
create or replace function outbox.count_deliveries(filter jsonb, out matched bigint, out exact boolean)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set jit = off
as $$
declare
    most constant integer := 10000;
    most_looks constant integer := 1000000;
    f constant outbox.delivery_filter := outbox_internal.read_filter(filter, clock_timestamp());
    dead_alone constant boolean := f.states = '{dead}';
begin
    if f.states = '{scheduled}' then
        matched := (select count(*) from (select from outbox_internal.scheduled_deliveries(f) s limit most + 1) r);
        exact := matched <= most;
        matched := least(matched, most);
        return;
    end if;
    select count(*) into matched
      from (
        select from (
            select outbox_internal.is_meant(d, f) as meant
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
comment on function outbox.count_deliveries is
    'The number of deliveries that a filter means, and whether it is exact.';

-- The scheduled events that a filter means, once for each sink that takes their type, or with an empty sink if none does. None
-- has an error. Times are those of the emit.
create or replace function outbox_internal.scheduled_deliveries(f outbox.delivery_filter) returns table (
    id bigint, uid uuid, sink text, type text, key text, created_at timestamptz, deliver_at timestamptz
)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select s.id, s.uid, coalesce(k.name, '')::text, s.type::text, s.key::text, s.created_at, s.deliver_at
      from outbox.scheduled s
      left join (select k.name, outbox_internal.types_of(k.name) as types from outbox.sink k offset 0) k
        on k.types is null or s.type like any (k.types)
     where 'scheduled' = any (f.states) and f.status is null and f.error is null and f.kind is null
       and (f.uids is null or s.uid = any (f.uids)) and (f.sink is null or k.name = f.sink)
       and (f.type_like is null or s.type like f.type_like) and (f.key is null or s.key = f.key)
       and (f.tenant is null or s.tenant = f.tenant)
       and (f.since is null or s.created_at >= f.since) and (f.until is null or s.created_at < f.until)
       and (f.as_of is null or s.created_at < f.as_of)
$$;

-- The number of events that a replay means, of ids in (after_id, upto_id], up to `most` and for about `most_seconds`;
-- `upto` is how far it was counted.
create or replace function outbox_internal.count_matches(
    r outbox.replay, after_id bigint, most bigint, most_seconds double precision, out events bigint, out upto bigint
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    step constant bigint := 50000;
    until_time constant timestamptz := clock_timestamp() + most_seconds * interval '1 second';
    shards constant smallint[] := outbox_internal.replay_shards(r.key);
    high bigint;
    found_now bigint;
begin
    events := 0;
    upto := greatest(after_id, r.from_id);
    if r.ids is not null then
        select count(*) into events
          from outbox.event e
         where e.id = any (r.ids) and e.id > upto and e.id <= r.upto_id
           and outbox_internal.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like, r.routed,
                                   r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts,
                                   r.b_snapshots, r.last_ids)
           and (r.tenant is null or e.tenant = r.tenant);
        upto := r.upto_id;
    end if;
    while upto < r.upto_id and events <= most loop
        high := least(upto + step, r.upto_id);
        select count(*) into found_now
          from outbox.event e
         where e.id > upto and e.id <= high and e.shard = any (shards)
           and outbox_internal.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like, r.routed,
                                   r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts,
                                   r.b_snapshots, r.last_ids)
           and (r.tenant is null or e.tenant = r.tenant);
        events := events + found_now;
        upto := high;
        exit when clock_timestamp() > until_time;
    end loop;
end
$$;

-- The next rows that an action looks at: at most `most`. Dead ones are looked at sink by sink, in the order of ids; where
-- other states are meant, whatever rows come next in the order of ids; with uids, their rows alone. `next_id` and
-- `next_sink` say where to go on, null behind the last row.
create or replace function outbox_internal.next_deliveries(
    f outbox.delivery_filter, uids uuid[], after_id bigint, after_sink text, most integer,
    out ids bigint[], out sinks text[], out next_id bigint, out next_sink text
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
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

-- Read a filter: an object with any of sink, type (a pattern with "*"), key, tenant, error (a part of it, in any case), kind,
-- status, since and until (when the event was emitted: from, and before), as_of, uids and states. All that is given must hold.
-- Times are those of outbox_internal.past_time, and ages count from `at`. Without `states` dead ones
-- are meant. `kind` is that of an error without a status (see outbox_internal.error_kind). With `as_of`, ages count from this time, and rows that came, died or failed later are not meant: an action that
-- gets it does not go beyond what was counted then.
create or replace function outbox_internal.read_filter(filter jsonb, at timestamptz) returns outbox.delivery_filter
language plpgsql stable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    kinds constant jsonb := '{"sink": "string", "type": "string", "key": "string", "tenant": "string", "error": "string",
                              "kind": "string", "status": "number", "since": "string", "until": "string", "as_of": "string",
                              "uids": "array", "states": "array"}';
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
        at := outbox_internal.past_time('as_of', filter -> 'as_of', at);
        read.as_of := at;
    end if;
    for name, value in select * from jsonb_each(filter) loop
        given := value #>> '{}';
        fault := case
            when not kinds ? name then
                format('a filter has no field "%s"; it has: sink, type, key, tenant, error, kind, status, since, until, as_of, '
                       'uids, states', left(name, 60))
            when jsonb_typeof(value) <> kinds ->> name then
                format('%s of a filter must be %s %s, not %s', name, case kinds ->> name when 'array' then 'an' else 'a' end,
                       kinds ->> name, jsonb_typeof(value))
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
    end loop;
    read.sink := filter ->> 'sink';
    read.type_like := replace(replace(replace(replace(filter ->> 'type', '\', '\\'), '%', '\%'), '_', '\_'), '*', '%');
    read.key := filter ->> 'key';
    read.tenant := filter ->> 'tenant';
    read.error := lower(filter ->> 'error');
    read.kind := filter ->> 'kind';
    read.status := filter ->> 'status';
    read.since := case when filter ? 'since' then outbox_internal.past_time('since', filter -> 'since', at) end;
    read.until := case when filter ? 'until' then outbox_internal.past_time('until', filter -> 'until', at) end;
    read.uids := case when filter ? 'uids' then array(select distinct jsonb_array_elements_text(filter -> 'uids')::uuid) end;
    read.states := case when filter ? 'states' then array(select distinct jsonb_array_elements_text(filter -> 'states'))
                        else '{dead}' end;
    if read.since > read.until then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('since (%s) is after until (%s)', read.since, read.until);
    end if;
    if read.sink is not null then
        perform outbox_internal.require_sink(read.sink);
    end if;
    return read;
end
$$;

-- A filter as it is recorded: the key is replaced by its hash, and more than 100 uids by their number, the first 100 and a
-- hash of all. With `hide_uids`, as for an erasure, there is no uid.
create or replace function outbox_internal.hashed_filter(filter jsonb, hide_uids boolean default false) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when filter is not null then coalesce(jsonb_object_agg(
               f.name,
               case when f.name = 'key' and jsonb_typeof(f.value) = 'string'
                    then to_jsonb(outbox_internal.keyed_hash(f.value #>> '{}'))
                    when f.name = 'uids' and jsonb_typeof(f.value) = 'array'
                    then (select case when count(*) <= 100 and not hide_uids then coalesce(jsonb_agg(u.uid order by u.uid), '[]')
                                      else jsonb_strip_nulls(jsonb_build_object(
                                     'count', count(*), 'all', outbox_internal.keyed_hash(string_agg(u.uid, ',' order by u.uid)),
                                     'uids', case when not hide_uids
                                                  then jsonb_path_query_array(jsonb_agg(u.uid order by u.uid), '$[0 to 99]') end)) end
                            from (select distinct lower(jsonb_array_elements_text(f.value)) collate "C" as uid) u)
                    else f.value end), '{}') end
      from jsonb_each(case when jsonb_typeof(filter) = 'object' then filter end) f (name, value)
$$;

-- One step of a retry: deliveries that `filter` means, which may be dead and waiting ones, are due now, and their attempts
-- begin again. At most `most` rows behind (`after_id`, `after_sink`) are looked at, and `most_done` of them retried;
-- `next_id` and `next_sink` are where the next step continues, null behind the last one. The first step records the
-- action and returns its number, which the others are given. It retries what was in its state when the first step
-- began, so what dies again is not retried endlessly.
--
-- Rows of a key are retried in the order of ids, and claimed in it. Rows that are being delivered, and those that another
-- session has locked, are left and counted as `under_way`. `unsettled` is for outbox.discard_deliveries, and 0.
--
-- Rows that are due count for `pending_max`, and later ones of their keys wait behind them. So a step retries nothing and
-- says `is_full` while a sink of its rows has `most_due` that are due: they are to be delivered first. `due_mark` changes
-- when some of these are. A sink with claim = "rows" is never too full: due rows are its usual state.
create or replace function outbox.retry_deliveries(
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
set jit = off
as $$
declare
    f outbox.delivery_filter;
    began timestamptz;
    looked_at bigint[];
    sinks text[];
    free_ids bigint[];
    free_sinks text[];
begin
    audit_id := outbox_internal.record_action('dead retry', filter ->> 'sink', filter, 0, actor, reason, audit_id);
    select a.at into began from outbox.audit a where a.id = audit_id;
    f := outbox_internal.read_filter(filter, began);
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
      from outbox_internal.next_deliveries(f, f.uids, coalesce(after_id, 0), coalesce(after_sink, ''), most) n;
    done := 0;
    under_way := 0;
    unsettled := 0;
    select sum(r.mark) filter (where r.due >= most_due) into due_mark
      from (select distinct s.sink from unnest(sinks) s (sink)
             where not exists (select from outbox.sink q where q.name = s.sink and q.claim = 'rows')) k
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
         where outbox_internal.is_meant(d, f) and outbox_internal.was_before(d, began, false)
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
     where outbox_internal.is_meant(d, f) and outbox_internal.was_before(d, began, false)
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
    perform outbox_internal.record_action('dead retry', filter ->> 'sink', filter, done, actor, reason, audit_id);
end
$$;
comment on function outbox.retry_deliveries is
    'One step of `dead retry`: make deliveries that a filter means due again. Recorded in outbox.audit.';

-- One step of a discard, as outbox.retry_deliveries: deliveries that `filter` means, of any state, are deleted, and
-- outbox.discarded says so. Later events of their keys go on. With `among`, no other uids than these are looked at.
--
-- A scheduled event is deleted for all sinks, whichever sink `filter` names.
--
-- Rows whose events would be read again (see outbox_internal.discard_rows) are left and counted as `unsettled`;
-- `unsettled_uids` names them. Relays cannot renew their leases meanwhile: call it in a transaction of its own. Tables are
-- locked in the order in which outbox.rebase locks them.
create or replace function outbox.discard_deliveries(
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
set jit = off
as $$
declare
    f outbox.delivery_filter;
    began timestamptz;
    looked_at bigint[];
    sinks text[];
    gone_uids uuid[];
begin
    perform outbox_internal.begin_action('outbox.discard_deliveries');
    if coalesce(trim(reason), '') = '' then
        raise exception using errcode = 'invalid_parameter_value', message = 'a discard needs a reason';
    end if;
    lock table outbox.event, outbox.sink, outbox.shard, outbox.progress in access share mode;
    audit_id := outbox_internal.record_action('dead discard', filter ->> 'sink', filter, 0, actor, reason, audit_id);
    select a.at into began from outbox.audit a where a.id = audit_id;
    f := outbox_internal.read_filter(filter, began);
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    if 'scheduled' = any (f.states) then
        if f.states <> '{scheduled}' then
            raise exception using errcode = 'invalid_parameter_value',
                message = 'scheduled events are discarded apart from other deliveries';
        end if;
        f.as_of := least(f.as_of, began);
        with meant as materialized (
            select s.uid from outbox_internal.scheduled_deliveries(f) s limit most
        ),
        gone as (
            delete from outbox.scheduled s
             where s.uid = any (array(select l.uid from outbox.scheduled l
                                       where l.uid = any (array(select m.uid from meant m)) for update skip locked))
            returning s.uid
        ),
        freed as (
            delete from outbox.unique_key k using gone g where k.uid = g.uid
        )
        select count(*) filter (where g.uid is not null), count(*) filter (where g.uid is null), array_agg(g.uid)
          into done, under_way, gone_uids from meant m left join gone g on g.uid = m.uid;
        unsettled := 0;
        if done + under_way = most and done > 0 then
            next_id := 0;
            next_sink := '';
        end if;
        perform outbox_internal.record_action('dead discard', filter ->> 'sink', filter, done, actor, reason, audit_id, gone_uids);
        return;
    end if;
    select n.ids, n.sinks, n.next_id, n.next_sink into looked_at, sinks, next_id, next_sink
      from outbox_internal.next_deliveries(f, coalesce(among, f.uids), coalesce(after_id, 0), coalesce(after_sink, ''), most) n;
    select r.done, r.unsettled, r.unsettled_uids, r.gone_uids into done, unsettled, unsettled_uids, gone_uids
      from outbox_internal.discard_rows(looked_at, sinks, f, began, null, actor, reason) r;
    select count(*) into under_way
      from unnest(looked_at, sinks) w (id, sink)
      join outbox.delivery d on d.id = w.id and d.sink = w.sink
     where outbox_internal.is_meant(d, f) and outbox_internal.was_before(d, began, true);
    under_way := under_way - unsettled;
    perform outbox_internal.record_action('dead discard', filter ->> 'sink', filter, done, actor, reason, audit_id, gone_uids);
end
$$;
comment on function outbox.discard_deliveries is
    'One step of `dead discard`: give up deliveries that a filter means, so that later events of their keys go on. Recorded '
    'in outbox.audit.';

-- Delete those of these rows that `f` meant when the action began, or that have been dead since before `cutoff`, with a mark for
-- each under the id that the log has, and return how many. Rows that are being delivered, or locked, are left.
--
-- The shards are locked before the positions are read, so that none is claimed, and no position set back, meanwhile. A row goes
-- only when the position of its shard has passed its event, written under the shard's newest epoch, or when the log no longer
-- has the event: else a session that begins at that position would read the event and deliver it. The others are `unsettled`.
-- `gone_uids` are the uids of the deleted rows.
create or replace function outbox_internal.discard_rows(
    looked_at bigint[], of_sinks text[], f outbox.delivery_filter, began timestamptz, cutoff timestamptz, actor text, reason text,
    out done bigint, out unsettled bigint, out unsettled_uids uuid[], out gone_uids uuid[]
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_variable
declare
    numbering_floor constant bigint := (select m.floor from outbox.meta m);
    ids bigint[];
    sinks text[];
begin
    perform from (
        select distinct d.sink, d.shard
          from unnest(looked_at, of_sinks) w (id, sink)
          join outbox.delivery d on d.id = w.id and d.sink = w.sink
         where case when cutoff is null then outbox_internal.is_meant(d, f) else outbox_internal.died_before(d, cutoff) end
    ) c
       join outbox.shard s on s.sink = c.sink and s.shard = c.shard
      order by s.sink, s.shard
        for share of s;
    select array_agg(l.id), array_agg(l.sink) into ids, sinks
      from (
        select d.id, d.sink
          from unnest(looked_at, of_sinks) w (id, sink)
          join outbox.delivery d on d.id = w.id and d.sink = w.sink
         where case when cutoff is null then outbox_internal.is_meant(d, f) and outbox_internal.was_before(d, began, true)
                    else outbox_internal.died_before(d, cutoff) end
           and (d.lease_until is null or d.lease_until <= clock_timestamp())
         order by d.sink, d.id
           for update of d skip locked
      ) l;
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
             -- After a rebase the event may have another id.
             where l.id = any (array[d.id, (select u.id from outbox.uid u where u.uid = d.uid)])
               and l.uid = d.uid and l.created_at = d.created_at
             limit 1
          ) e on true
    ),
    judged as materialized (
        select l.sink, l.id, l.uid, coalesce(l.log_id, l.id) as mark_id,
               l.log_id is null or exists (
                    select from standing n
                     where n.sink = l.sink and n.shard = l.shard
                       and outbox_internal.position_passed(l.log_id, l.xid, n.a_seq, n.a_snapshot, n.a_next, n.b_snapshot, n.last_id,
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
    select (select count(*) from gone), count(*) filter (where not j.passed), array_agg(j.uid) filter (where not j.passed),
           (select array_agg(distinct g.uid) from gone g) into done, unsettled, unsettled_uids, gone_uids
      from judged j;
end
$$;

-- Record an action and return its number. With `audit_id`, count on one of this session's role instead, which must be the
-- same action, begun at most a day ago: no row of the audit tells of something else than was done under it. The first 100
-- `uids` that were changed are added to the filter as `changed`, unless it has uids.
create or replace function outbox_internal.record_action(
    action text, sink text, filter jsonb, changed bigint, actor text, reason text, audit_id bigint default null,
    uids uuid[] default null
) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    recorded bigint;
begin
    if audit_id is not null then
        update outbox.audit a
           set count = a.count + changed,
               filter = case when uids is null or a.filter ? 'uids' then a.filter else a.filter || jsonb_build_object('changed',
                   to_jsonb((array(select jsonb_array_elements_text(a.filter -> 'changed')::uuid) || uids)[1:100])) end
         where a.id = audit_id and a.action = action and a.role_name = outbox_internal.emitter() and a.login = session_user
           and a.at > clock_timestamp() - interval '1 day' and a.actor is not distinct from actor
           and a.sink is not distinct from sink and a.filter - 'changed' is not distinct from outbox_internal.hashed_filter(filter, action like 'erase%')
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
    values (actor, action, sink, outbox_internal.hashed_filter(filter, action like 'erase%'), changed, reason)
    returning id into recorded;
    return recorded;
end
$$;
