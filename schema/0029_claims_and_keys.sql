-- A claim can begin where the last one ended, and tells which events were tried before. The unique key of an event
-- that is discarded before its time, or erased, is free soon. Sinks that a restore has taken back are registered again. Relays of
-- earlier versions work on this schema.

-- As in version 21, and a claim can begin behind the place where the last one ended, so that it does not pass by the rows in
-- flight again: of the rows that wait, only those behind `after_due` and `after_id` are looked at, or all if these are null.
-- `due` is when a row was due. Times are in seconds since 1970. `tried` says whether there was an attempt before. Relays of
-- earlier versions pass no place, and ask for the other columns alone.
drop function outbox.claim_rows(
    text, uuid, uuid, double precision, integer, bigint, boolean, text[], boolean, boolean, boolean, bigint);
create function outbox.claim_rows(
    sink_name text, owner_id uuid, lease_id uuid, lease_for double precision, most_rows integer, most_bytes bigint,
    hold boolean, keys text[], sweep boolean, suspects boolean, with_followers boolean, most_payload bigint default null,
    after_due double precision default null, after_id bigint default null
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, ordered boolean, attempts integer, claims integer, fault text,
    due double precision, tried boolean
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    first_time constant timestamptz := '0001-01-01 00:00:00+00';
    last_time constant timestamptz := '9999-01-01 00:00:00+00';
    ceiling constant bigint := case when most_payload is not null then least(most_payload, outbox.payload_ceiling()) end;
    after_time constant timestamptz := to_timestamp(after_due);
    waiting bigint[];
    held bigint[];
    behind bigint[] := '{}';
    chosen bigint[];
    scheduled bigint[];
    counted integer := case when outbox.known_down(sink_name) then 0 else 1 end;
begin
    if suspects then
        chosen := array(
            select d.id from outbox.delivery d
             where d.sink = sink_name and d.suspect and d.state <> 'dead' and d.due_at <= now()
               and (d.lease_until is null or d.lease_until <= now())
               and (not d.ordered or (
                    not exists (
                        select from outbox.delivery f
                         where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered and f.state <> 'dead')
                    and not (hold and coalesce(outbox.first_dead(sink_name, d.key) < d.id, false))))
             order by d.due_at, d.id
             limit 1
               for update skip locked
        );
    else
        -- Rows that are passed by are due later, so that those behind them come next.
        for turn in 1..25 loop
            waiting := array(
                select d.id from outbox.delivery d
                 where d.sink = sink_name and d.state = 'waiting' and d.due_at <= now()
                   and (d.due_at, d.id) > (coalesce(after_time, '-infinity'), coalesce(after_id, 0))
                   and (d.lease_until is null or d.lease_until <= now()) and not d.suspect
                   and (not d.ordered or (
                        not exists (
                            select from outbox.delivery f
                             where f.sink = sink_name and f.key = d.key and f.id < d.id and f.ordered and f.state <> 'dead')
                        and not (hold and coalesce(outbox.first_dead(sink_name, d.key) < d.id, false))))
                 order by d.due_at, d.id
                 limit most_rows
                   for update skip locked
            );
            exit when waiting = '{}';
            scheduled := array(
                select d.id from outbox.delivery d
                 where d.sink = sink_name and d.id = any (waiting) and outbox.is_untouched(d));
            exit when scheduled = '{}';
            waiting := array(select w from unnest(waiting) w where w <> all (scheduled))
                       || outbox.take_scheduled(sink_name, scheduled);
            exit when waiting <> '{}';
        end loop;
        if sweep then
            keys := array(select k.key from outbox.held_keys(sink_name, null, null) k);
        end if;
        held := array(
            select h.id from unnest(keys) k (key)
             cross join lateral (
                select d.id, d.state, d.due_at, d.lease_until, d.suspect from outbox.delivery d
                 where d.sink = sink_name and d.key = k.key and d.ordered and d.state <> 'dead'
                 order by d.id limit 1
             ) h
             where h.state = 'held' and h.due_at <= now()
               and (h.lease_until is null or h.lease_until <= now()) and not h.suspect
               and not (hold and coalesce(outbox.first_dead(sink_name, k.key) < h.id, false))
             limit most_rows
        );
        if with_followers and cardinality(waiting || held) between 1 and most_rows - 1 then
            behind := array(
                select r.id from outbox.delivery h
                 cross join lateral (
                    select d.id, d.due_at, d.lease_until, d.last_error, d.suspect from outbox.delivery d
                     where d.sink = sink_name and d.key = h.key and d.ordered and d.id > h.id and d.state <> 'dead'
                     order by d.id limit most_rows / cardinality(waiting || held)
                 ) r
                 where h.sink = sink_name and h.id = any (waiting || held) and h.ordered and h.last_error is null
                   and r.last_error is null and not r.suspect and r.due_at <= now()
                   and (r.lease_until is null or r.lease_until <= now())
            );
        end if;
        chosen := array(
            select c.id from (
                select b.id, b.follows, sum(b.bytes) over (order by b.follows, b.id) - b.bytes as before
                  from (
                    select d.id, d.id = any (behind) as follows,
                           case when octet_length(d.payload) > ceiling then 0
                                else coalesce(octet_length(d.payload), 0) end
                           + coalesce(octet_length(d.key), 0)
                           + case when d.headers is null then 0 else octet_length(d.headers::text) end as bytes
                      from outbox.delivery d
                     where d.sink = sink_name and d.id = any (waiting || held || behind)
                  ) b
            ) c
            where c.before < most_bytes or c.before <= 0
            order by c.follows, c.id
            limit most_rows
        );
        -- A statement of its own: joined to the change, a plan made while there was no row goes through all rows of the
        -- sink for each row that is claimed.
        if held <> '{}' or behind <> '{}' then
            chosen := array(
                select l.id from outbox.delivery l
                 where l.sink = sink_name and l.id = any (chosen) and l.state <> 'dead' and l.due_at <= now()
                   and (l.lease_until is null or l.lease_until <= now())
                   for update skip locked
            );
        end if;
        -- A row that must wait, or was claimed by another relay since it was looked for, may come before what is locked
        -- here.
        if behind <> '{}' then
            chosen := array(
                select i.id from (
                    select l.key, l.ordered, array_agg(l.id) as ids,
                           case when hold and l.ordered then outbox.first_dead(sink_name, l.key) end as dead
                      from outbox.delivery l
                     where l.sink = sink_name and l.id = any (chosen) group by l.key, l.ordered
                ) c
                 left join lateral (
                    select f.id from outbox.delivery f
                     where f.sink = sink_name and f.key = c.key and f.ordered and f.state <> 'dead'
                       and f.id <> all (c.ids)
                     order by f.id limit 1
                ) other on c.ordered
                 cross join lateral unnest(c.ids) i (id)
                 where (other.id is null or i.id < other.id) and (c.dead is null or i.id < c.dead)
            );
        end if;
    end if;
    return query
    update outbox.delivery d
       set owner = owner_id, lease = lease_id, lease_until = clock_timestamp() + lease_for * interval '1 second',
           claims = least(d.claims::bigint + counted, 2147483647)::integer
     where d.sink = sink_name and d.id = any (chosen)
    returning d.id, d.shard, d.uid::text, d.type, d.key,
              case when ceiling is null
                     or octet_length(d.payload) <= ceiling
                        and (d.deliver_at is null or d.deliver_at >= first_time and d.deliver_at < last_time)
                   then d.payload end,
              d.content_type, d.headers::text,
              case when ceiling is null or d.deliver_at >= first_time and d.deliver_at < last_time then d.deliver_at end,
              case when ceiling is null then d.created_at
                   else greatest(first_time, least(d.created_at, last_time - interval '1 second')) end,
              d.ordered, d.attempts, d.claims,
              case when ceiling is not null and (d.deliver_at < first_time or d.deliver_at >= last_time)
                   then 'deliver_at lies outside the years 1 to 9998'
                   when ceiling is not null and d.payload is null then 'payload is null'
                   when octet_length(d.payload) > ceiling
                   then format('payload has %s bytes, more than the ceiling of %s', octet_length(d.payload), ceiling)
              end,
              extract(epoch from d.due_at)::double precision, d.last_attempt_at is not null;
end
$$;

-- As in version 24, and `tried` says whether there was an attempt before, for which relays of earlier versions do not ask.
drop function outbox.claim_queued(text, uuid, uuid, double precision, integer, bigint, bigint, boolean, text);
create function outbox.claim_queued(
    sink_name text, owner_id uuid, lease_id uuid, lease_for double precision, most_rows integer, most_bytes bigint,
    most_payload bigint, fair boolean, after_tenant text
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, ordered boolean, attempts integer, claims integer, fault text,
    place integer, tenant text, tried boolean
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set enable_incremental_sort = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    first_time constant timestamptz := '0001-01-01 00:00:00+00';
    last_time constant timestamptz := '9999-01-01 00:00:00+00';
    most_tenants constant integer := 2000;
    most_passed constant integer := 2000;
    most_scheduled constant integer := 100;  -- of which outbox.take_scheduled locks the uids
    ceiling constant bigint := least(most_payload, outbox.payload_ceiling());
    counted constant integer := case when outbox.known_down(sink_name) then 0 else 1 end;
    due constant bigint[] := outbox.due_rows(sink_name, least(most_rows, 200));
    met bigint[];
    early bigint[];
    scheduled bigint[];
    chosen bigint[];
    ids bigint[];
    places integer[];
    tenants text[] := '{}';
    walk_end text := after_tenant;
    wrapped boolean := after_tenant is null;
    finished boolean := false;
    walked integer := 0;
    passed integer := 0;
begin
    most_rows := least(greatest(coalesce(most_rows, 1), 1), 10000);
    if due <> '{}' then
        update outbox.delivery d set ready = true where d.sink = sink_name and d.id = any (due);
    end if;
    loop
        chosen := '{}';
        if fair then
            tenants := outbox.next_tenants(sink_name, walk_end, case when wrapped then after_tenant end, most_rows, false);
            if cardinality(tenants) < most_rows and not wrapped then
                wrapped := true;
                tenants := tenants
                    || outbox.next_tenants(sink_name, null, after_tenant, most_rows - cardinality(tenants), false);
            end if;
            finished := cardinality(tenants) < most_rows;
            walked := walked + cardinality(tenants);
            walk_end := coalesce(tenants[cardinality(tenants)], walk_end);
            with locked as materialized (
                select r.id, r.early, r.untouched, r.n, t.n as turn
                  from unnest(tenants) with ordinality t (tenant, n)
                 cross join lateral (
                    select l.*, row_number() over () as n
                      from (
                        select d.id, d.due_at > now() as early, outbox.is_untouched(d) as untouched
                          from outbox.delivery d
                         where d.sink = sink_name and d.tenant = t.tenant and d.ready and d.state = 'waiting' and not d.suspect
                           and (d.lease_until is null or d.lease_until <= now())
                         order by d.priority desc, d.due_at, d.id
                         limit (most_rows + cardinality(tenants) - 1) / cardinality(tenants)
                           for update skip locked
                      ) l
                 ) r
            )
            select array_agg(l.id order by l.n, l.turn), array_agg(l.id) filter (where l.early),
                   array_agg(l.id) filter (where l.untouched and not l.early)
              into met, early, scheduled from locked l;
        else
            with locked as materialized (
                select d.id, d.due_at > now() as early, outbox.is_untouched(d) as untouched
                  from outbox.delivery d
                 where d.sink = sink_name and d.ready and d.state = 'waiting' and not d.suspect and d.tenant is null
                   and (d.lease_until is null or d.lease_until <= now())
                 order by d.priority desc, d.due_at, d.id
                 limit most_rows
                   for update skip locked
            )
            select array_agg(l.id), array_agg(l.id) filter (where l.early),
                   array_agg(l.id) filter (where l.untouched and not l.early)
              into met, early, scheduled from locked l;
            finished := met is null;
        end if;
        chosen := coalesce(met, '{}');
        if early is not null then
            update outbox.delivery d set ready = false where d.sink = sink_name and d.id = any (early);
            chosen := array(select c from unnest(chosen) c where c <> all (early));
            passed := passed + cardinality(early);
        end if;
        if scheduled is not null then
            met := outbox.take_scheduled(sink_name, array(
                select c.id from unnest(chosen) with ordinality c (id, place) where c.id = any (scheduled)
                 order by c.place limit most_scheduled));
            update outbox.delivery d set ready = false
             where d.sink = sink_name and d.id = any (scheduled) and d.due_at > now();
            chosen := array(select c from unnest(chosen) c where c <> all (scheduled) or c = any (met));
            passed := passed + cardinality(scheduled) - cardinality(met);
        end if;
        exit when finished or chosen <> '{}' or walked >= most_tenants or passed >= most_passed;
    end loop;
    if chosen = '{}' then
        if fair or not finished or passed > 0 then
            return query select 0::bigint, -1::smallint, ''::text, ''::text, null::text, null::bytea, ''::text, null::text,
                                null::timestamptz, first_time, false, 0, 0, null::text,
                                case when finished and passed = 0 then 0 else 1 end, walk_end, false;
        end if;
        return;
    end if;
    chosen := array(
        select c.id from (
            select b.id, b.place, sum(b.bytes) over (order by b.place) - b.bytes as before
              from (
                select d.id, n.place,
                       case when octet_length(d.payload) > ceiling then 0 else coalesce(octet_length(d.payload), 0) end
                       + coalesce(octet_length(d.key), 0)
                       + case when d.headers is null then 0 else octet_length(d.headers::text) end as bytes
                  from unnest(chosen) with ordinality n (id, place)
                 cross join lateral (  -- offset 0: a plan that was made for a row or two would go through the whole sink
                    select l.id, l.payload, l.key, l.headers from outbox.delivery l
                     where l.sink = sink_name and l.id = n.id
                    offset 0
                 ) d
              ) b
        ) c
        where c.before < most_bytes or c.before <= 0
        order by c.place
        limit most_rows
    );
    -- The tenant that was served last: one that got no row because of a bound comes first in the next walk.
    if fair then
        walk_end := coalesce((select d.tenant from outbox.delivery d
                               where d.sink = sink_name and d.id = chosen[least(cardinality(chosen), cardinality(tenants))]),
                             walk_end);
    end if;
    -- For the same reason, the places are not joined to the change: a binary search finds each.
    select array_agg(n.id order by n.id), array_agg(n.place::integer order by n.id) into ids, places
      from unnest(chosen) with ordinality n (id, place);
    return query
    update outbox.delivery d
       set owner = owner_id, lease = lease_id, lease_until = clock_timestamp() + lease_for * interval '1 second',
           claims = least(d.claims::bigint + counted, 2147483647)::integer
     where d.sink = sink_name and d.id = any (ids)
    returning d.id, d.shard, d.uid::text, d.type, d.key,
              case when octet_length(d.payload) <= ceiling
                     and (d.deliver_at is null or d.deliver_at >= first_time and d.deliver_at < last_time)
                   then d.payload end,
              d.content_type, d.headers::text,
              case when d.deliver_at >= first_time and d.deliver_at < last_time then d.deliver_at end,
              greatest(first_time, least(d.created_at, last_time - interval '1 second')),
              d.ordered, d.attempts, d.claims,
              case when d.deliver_at < first_time or d.deliver_at >= last_time
                   then 'deliver_at lies outside the years 1 to 9998'
                   when d.payload is null then 'payload is null'
                   when octet_length(d.payload) > ceiling
                   then format('payload has %s bytes, more than the ceiling of %s', octet_length(d.payload), ceiling)
              end,
              places[width_bucket(d.id, ids)], case when fair then walk_end end, d.last_attempt_at is not null;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Unique keys
-- ---------------------------------------------------------------------------------------------------------

-- The key of an event that loses its row before it is due is looked at now: it was scheduled, and the next look would be at
-- its time, or in an hour.
create function outbox.row_went_early() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
begin
    update outbox.unique_key k set look_at = clock_timestamp()
     where k.ctid = any (array(select l.ctid from outbox.unique_key l where l.uid = old.uid for update skip locked));
    return null;
end
$$;

create trigger row_went_early after delete on outbox.delivery
for each row when (old.deliver_at is not null and old.due_at > statement_timestamp() and old.sink < '~')
execute function outbox.row_went_early();

-- As in version 9, and the unique keys of the events are deleted: they may name the subject.
create or replace function outbox.change_events(
    e outbox.erasure, key text, uid uuid, ids bigint[], later bigint, upto_id bigint
) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_variable
declare
    uids uuid[];
    parts regclass[];
    earliest timestamptz;
begin
    with husks as (
        update outbox.event v
           set payload = '', headers = null, key = null, content_type = 'application/x-erased'
         where v.id = any (ids) and (v.key = change_events.key or v.uid = change_events.uid)
        returning v.uid, v.tableoid::regclass as part, v.created_at
    )
    select array_agg(h.uid), array_agg(distinct h.part), min(h.created_at) into uids, parts, earliest from husks h;
    update outbox.erasure o
       set done = o.done + coalesce(cardinality(uids), 0), left_over = o.left_over + later,
           first_at = least(o.first_at, earliest)
     where o.id = e.id;
    uids := uids || change_events.uid;
    update outbox.attempt a set error = null, detail = null
     where a.uid = any (uids) and (a.error is not null or a.detail is not null);
    delete from outbox.unique_key k  -- in one order, as emits lock them
     where k.ctid = any (array(select l.ctid from outbox.unique_key l where l.uid = any (uids)
                                order by l.type, l.unique_key for update));
    update outbox.discarded m set reason = 'erased' where m.uid = any (uids) and m.reason <> 'erased';
    delete from outbox.delivery d
     where (d.uid = any (uids) or (d.id > e.place and d.id <= upto_id and d.key = change_events.key))
       and d.sink < '~' and not exists (select from outbox.sink k where k.name = d.sink);
    perform outbox.supersede_archives(parts) where parts is not null;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Sinks
-- ---------------------------------------------------------------------------------------------------------

-- Register those of the sinks that are missing, as outbox.register_sinks does, and leave the others as they are: a relay whose
-- registrations a restore has taken back does not know what other relays have registered since.
create function outbox.register_missing_sinks(wanted jsonb, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint)
returns table (name text, generation bigint, patterns text[])
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    missing jsonb;
begin
    lock table outbox.sink in share row exclusive mode;
    missing := (select coalesce(jsonb_agg(w.sink), '[]') from jsonb_array_elements(wanted) w (sink)
                 where not exists (select from outbox.sink s where s.name = w.sink ->> 'name'));
    return query select r.name, r.generation, r.patterns
                   from outbox.register_sinks(missing, tick_seq, tick_snapshot, tick_next) r;
end
$$;
