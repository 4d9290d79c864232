-- Claim rows of the queue of a sink with claim = "rows", as outbox_internal.claim_rows does for other sinks: those of the highest
-- priority first, of these the ones that are due longest. `place` is the order in which they are to be delivered.
--
-- With `fair`, tenants take turns, and their priorities count among their own rows. The walk begins behind `after_tenant`, and
-- each tenant that it meets gets the same number of rows. It continues while it has found no row, up to a bound. `walk_end` of
-- each row is where the next walk begins. Without a row, one of shard -1 says that. Its place is 1 if a bound ended the search.
--
-- Rows that are not due are not in the queue. The ones whose time has come are put there first, up to a bound. A row that is
-- met and is due later leaves the queue, so it is met once.
create or replace function outbox_internal.claim_queued(
    sink_name text, owner_id uuid, lease_id uuid, lease_for double precision, most_rows integer, most_bytes bigint,
    most_payload bigint, fair boolean, after_tenant text
) returns setof outbox_internal.claimed_row
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
    most_tenants constant integer := 2000;
    most_passed constant integer := 2000;
    ceiling constant bigint := least(most_payload, outbox_internal.payload_ceiling());
    due constant bigint[] := outbox_internal.due_rows(sink_name, least(most_rows, 200));
    met bigint[];
    early bigint[];
    chosen bigint[];
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
            tenants := outbox_internal.next_tenants(sink_name, walk_end, case when wrapped then after_tenant end, most_rows, false);
            if cardinality(tenants) < most_rows and not wrapped then
                wrapped := true;
                tenants := tenants
                    || outbox_internal.next_tenants(sink_name, null, after_tenant, most_rows - cardinality(tenants), false);
            end if;
            finished := cardinality(tenants) < most_rows;
            walked := walked + cardinality(tenants);
            walk_end := coalesce(tenants[cardinality(tenants)], walk_end);
            with locked as materialized (
                select r.id, r.early, r.n, t.n as turn
                  from unnest(tenants) with ordinality t (tenant, n)
                 cross join lateral (
                    select l.*, row_number() over () as n
                      from (
                        select d.id, d.due_at > now() as early
                          from outbox.delivery d
                         where d.sink = sink_name and d.turn = t.tenant and d.ready and d.state = 'waiting' and not d.suspect
                           and (d.lease_until is null or d.lease_until <= now())
                         order by d.priority desc, d.due_at, d.id
                         limit (most_rows + cardinality(tenants) - 1) / cardinality(tenants)
                           for update skip locked
                      ) l
                 ) r
            )
            select array_agg(l.id order by l.n, l.turn), array_agg(l.id) filter (where l.early)
              into met, early from locked l;
        else
            with locked as materialized (
                select d.id, d.due_at > now() as early
                  from outbox.delivery d
                 where d.sink = sink_name and d.ready and d.state = 'waiting' and not d.suspect and d.turn is null
                   and (d.lease_until is null or d.lease_until <= now())
                 order by d.priority desc, d.due_at, d.id
                 limit most_rows
                   for update skip locked
            )
            select array_agg(l.id), array_agg(l.id) filter (where l.early)
              into met, early from locked l;
            finished := met is null;
        end if;
        chosen := coalesce(met, '{}');
        if early is not null then
            update outbox.delivery d set ready = false where d.sink = sink_name and d.id = any (early);
            chosen := array(select c from unnest(chosen) c where c <> all (early));
            passed := passed + cardinality(early);
        end if;
        exit when finished or chosen <> '{}' or walked >= most_tenants or passed >= most_passed;
    end loop;
    if chosen = '{}' then
        if fair or not finished or passed > 0 then
            return query select 0::bigint, -1::smallint, ''::text, ''::text, null::text, null::bytea, ''::text, null::text,
                                null::timestamptz, now(), null::text, null::text, false, 0, 0, lease_id, false,
                                null::double precision, case when finished and passed = 0 then 0 else 1 end, walk_end;
        end if;
        return;
    end if;
    chosen := array(
        select c.id from (
            select b.id, b.place, sum(b.bytes) over (order by b.place) - b.bytes as before
              from (
                select d.id, n.place,
                       outbox_internal.bytes_of(case when octet_length(d.payload) <= ceiling then d.payload end, d.key,
                                                d.headers::text) as bytes
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
        walk_end := coalesce((select d.turn from outbox.delivery d
                               where d.sink = sink_name and d.id = chosen[least(cardinality(chosen), cardinality(tenants))]),
                             walk_end);
    end if;
    return query select * from outbox_internal.take_rows(sink_name, chosen, owner_id, lease_id, lease_for, ceiling,
                                                         case when fair then walk_end end);
end
$$;

-- Lock rows of a sink whose time has come and that are not in its queue yet, at most `most`, and return them.
create or replace function outbox_internal.due_rows(sink_name text, most integer) returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
begin
    return array(
        select d.id from outbox.delivery d
         where d.sink = sink_name and not d.ready and d.state = 'waiting' and d.due_at <= now()
         order by d.due_at, d.id
         limit greatest(coalesce(most, 0), 0)
           for update skip locked);
end
$$;

-- Put rows whose time has come into the queues of their sinks, at most `most` of a sink, and return how many. So are rows that
-- belong to no queue, among the `most` that are due longest: a row that was made, or retried, while its sink was getting another
-- `claim`.
create or replace function outbox_internal.queue_due_rows(most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    sink_name text;
    due bigint[];
    queued integer := 0;
begin
    most := least(greatest(coalesce(most, 1000), 1), 10000);
    for sink_name in select k.name from outbox.sink k where k.claim = 'rows' order by k.name loop
        due := outbox_internal.due_rows(sink_name, most) || array(
            select l.id from (
                select d.id, d.ready from outbox.delivery d
                 where d.sink = sink_name and d.state = 'waiting' and d.due_at <= now()
                 order by d.due_at, d.id
                 limit most
            ) l
             where l.ready is null);
        if due <> '{}' then
            update outbox.delivery d set ready = true where d.sink = sink_name and d.id = any (due) and d.state = 'waiting';
            queued := queued + cardinality(due);
        end if;
    end loop;
    return queued;
end
$$;

-- End these leases of rows that `owner_id` claimed from the queue of a sink in claims without an answer, and count no claim.
-- The rows are looked for where claims find rows first, up to a bound. Others come back when their leases lapse.
create or replace function outbox_internal.give_queued_back(sink_name text, owner_id uuid, lease_ids uuid[]) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    most constant integer := 10000;
    most_tenants constant integer := 500;
    most_of_tenant constant integer := 20;
    given integer;
begin
    update outbox.delivery d
       set lease = null, lease_until = null, owner = null, claims = greatest(d.claims - 1, 0)
     where d.sink = sink_name and d.owner = owner_id and d.lease = any (lease_ids)
       and d.id = any (array(
            select f.id from (
                select q.id, q.lease, q.owner from outbox.delivery q
                 where q.sink = sink_name and q.ready and q.state = 'waiting' and not q.suspect and q.turn is null
                 order by q.priority desc, q.due_at, q.id limit most
            ) f
             where f.owner = owner_id and f.lease = any (lease_ids)
            union
            select f.id from unnest(outbox_internal.next_tenants(sink_name, null, null, most_tenants, true)) t (tenant)
             cross join lateral (
                select q.id, q.lease, q.owner from outbox.delivery q
                 where q.sink = sink_name and q.turn = t.tenant and q.ready and q.state = 'waiting' and not q.suspect
                 order by q.priority desc, q.due_at, q.id limit most_of_tenant
            ) f
             where f.owner = owner_id and f.lease = any (lease_ids)));
    get diagnostics given = row_count;
    return given;
end
$$;

-- The next tenants of the queue of a sink behind `after_tenant`, or from the first one on if it is null, up to `upto_tenant`
-- if that is not null, at most `most` of them: with `leased` all, otherwise those with a row that is not leased. It steps from
-- tenant to tenant, so the rows of one cost no more than one row.
create or replace function outbox_internal.next_tenants(
    sink_name text, after_tenant text, upto_tenant text, most integer, leased boolean
) returns text[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    first_tenant text := case
        when after_tenant is null
        then (select d.turn from outbox.delivery d
               where d.sink = sink_name and d.ready and d.state = 'waiting' and not d.suspect
                 and (leased or d.lease_until is null or d.lease_until <= now())
                 and d.turn is not null
               order by d.turn limit 1)
        else (select d.turn from outbox.delivery d
               where d.sink = sink_name and d.ready and d.state = 'waiting' and not d.suspect and d.turn > after_tenant
                 and (leased or d.lease_until is null or d.lease_until <= now())
               order by d.turn limit 1) end;
begin
    return array(
        with recursive queued (turn) as (
            select first_tenant collate "C"
            union all
            select (select d.turn from outbox.delivery d
                     where d.sink = sink_name and d.ready and d.state = 'waiting' and not d.suspect and d.turn > q.turn
                       and (leased or d.lease_until is null or d.lease_until <= now())
                     order by d.turn limit 1)
              from queued q where q.turn is not null and (upto_tenant is null or q.turn < upto_tenant)
        )
        select q.turn from queued q
         where q.turn is not null and (upto_tenant is null or q.turn <= upto_tenant)
         limit greatest(coalesce(most, 0), 0)
    );
end
$$;

-- Make rows of the next events of a window, in id order, and move the positions of their shards with them. The read is that of
-- outbox_internal.read_rest, or with `late` of outbox_internal.read_late; payloads stay in the database. `shards` are owned by
-- `owner_id` at `epochs`. Otherwise nothing is written, and `mine` is false.
--
-- `upto` is the last id that was read, null if the read was complete. The position is then that of `end_…`, otherwise the one
-- in the same window behind `upto`. `passed` are the shards whose positions were written; those of shards without an event
-- stay. `parked` counts rows, `dead` those of events that no relay can deliver, `due_in` is the number of seconds until the
-- next of the others is due if it is not yet.
--
-- With `reason`, rows are dead for it and have no payload: the event could not be parked in another way.
-- Rows that were there count as in outbox_internal.settle.
create or replace function outbox_internal.park_window(
    sink_name text, owner_id uuid, shards smallint[], epochs bigint[], types text[],
    a_seq bigint, a_snapshot pg_snapshot, a_next bigint, b_seq bigint, b_snapshot pg_snapshot, b_next bigint,
    late boolean, after_id bigint, upto_id bigint, most_rows integer, most_bytes bigint,
    end_a_seq bigint, end_a_snapshot pg_snapshot, end_a_next bigint,
    end_b_seq bigint, end_b_snapshot pg_snapshot, end_b_next bigint, end_last bigint,
    fair boolean, reason text, server text,
    out mine boolean, out upto bigint, out passed smallint[], out parked integer, out dead integer,
    out due_in double precision
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
    first_time constant timestamptz := '0001-01-01 00:00:00+00';
    last_time constant timestamptz := '9998-12-31 00:00:00+00';
    most_payload constant bigint := case when reason is null then 1::bigint << 30 else 0 end;
    ids bigint[];
    fault_ids bigint[];
    faults text[];
    earliest timestamptz;
    latest timestamptz;
    bytes bigint;
    scan_end bigint;
    fenced integer;
    former bigint[];
    former_rows integer;
    wanted integer;
begin
    perform outbox_internal.only_at(server);
    mine := true;
    passed := '{}';
    parked := 0;
    dead := 0;
    select array_agg(r.id order by r.id) filter (where r.shard >= 0), array_agg(distinct r.shard) filter (where r.shard >= 0),
           array_agg(r.id order by r.id) filter (where r.fault is not null),
           array_agg(r.fault order by r.id) filter (where r.fault is not null),
           min(r.created_at) filter (where r.shard >= 0), max(r.created_at) filter (where r.shard >= 0),
           max(r.id) filter (where r.shard < 0), sum(outbox_internal.bytes_of(r.payload, r.key, r.headers))
      into ids, passed, fault_ids, faults, earliest, latest, scan_end, bytes
      from (
        select l.* from outbox_internal.read_late(shards, types, a_snapshot, a_next, b_snapshot, after_id, upto_id, most_rows,
                                                  most_bytes, most_payload) l
         where late
        union all
        select l.* from outbox_internal.read_rest(shards, types, a_snapshot, b_snapshot, after_id, upto_id, most_rows, most_bytes,
                                                  most_payload) l
         where not late
      ) r;
    upto := scan_end;
    if ids is null then
        passed := '{}';
        return;
    end if;
    if cardinality(ids) >= most_rows or bytes >= most_bytes then
        upto := ids[cardinality(ids)];
    end if;
    select count(*) into fenced from (
        select from unnest(shards, epochs) f (shard, epoch)
          join outbox.shard s on s.sink = sink_name and s.shard = f.shard and s.epoch = f.epoch and s.owner = owner_id
         where f.shard = any (passed)
         order by s.shard
           for share of s
    ) locked;
    if fenced <> cardinality(passed) then
        mine := false;
        return;
    end if;
    -- Marks of events that were discarded before the position was put back.
    if exists (select from outbox.discarded m where m.sink = sink_name and m.id >= ids[1]) then
        ids := array(select i.id from unnest(ids) i (id)
                      where not exists (select from outbox.discarded m
                                          join outbox.event e on e.id = m.id and e.uid = m.uid
                                         where m.sink = sink_name and m.id = i.id));
    end if;
    wanted := cardinality(ids);
    with added as (
        insert into outbox.delivery (
            sink, id, shard, state, ordered, due_at, ready, priority, tenant, turn, last_error,
            uid, type, key, payload, content_type, headers, deliver_at, created_at, emitter
        )
        select sink_name, n.id, n.shard,
               case when n.fault is null then 'waiting' else 'dead' end, false, n.due_at,
               n.due_at <= clock_timestamp(), n.priority, n.tenant, case when fair then coalesce(n.tenant, '') end, n.fault,
               n.uid, n.type, n.key, n.payload, n.content_type, n.headers, n.deliver_at, n.created_at, n.emitter
          from (
            select e.id, e.shard, e.uid, e.type, case when octet_length(e.key) <= 1024 then e.key end as key,
                   case when reason is null then e.payload end as payload,
                   coalesce(e.content_type, 'application/json') as content_type,
                   case when reason is null then e.headers end as headers, t.due_at as deliver_at,
                   e.created_at, e.emitter, coalesce(e.priority, 0) as priority,
                   case when octet_length(e.tenant) <= 255 then e.tenant end as tenant,
                   coalesce(reason, (select f.fault from unnest(fault_ids, faults) f (id, fault) where f.id = e.id)) as fault,
                   greatest(now(), t.due_at) as due_at
              from outbox.event e
             cross join lateral (
                select case when e.deliver_at is not null
                            then least(e.deliver_at, last_time) + outbox_internal.spread_of(sink_name, e.uid) end as due_at
             ) t
             where e.id = any (ids)
               and e.created_at >= case when earliest <= first_time then '-infinity' else earliest end
               and e.created_at <= case when latest >= last_time then 'infinity' else latest end
               and not outbox_internal.is_erased(e.content_type, e.payload)
          ) n
        on conflict (sink, id) do nothing returning id
    ),
    total as (select count(*) as n from added)
    -- The rows that this statement saw before it added any, as in outbox_internal.settle.
    select t.n, case when t.n < wanted
                     then array(select d.id from outbox.delivery d
                                 where d.sink = sink_name and d.id = any (ids) and d.id not in (select a.id from added a)
                                   and exists (select from outbox.event e
                                                where e.id = d.id and e.uid = d.uid and e.created_at = d.created_at))
                     else '{}' end
      into parked, former
      from total t;
    former_rows := cardinality(former);
    if parked + former_rows < wanted then
        raise exception 'outbox_internal.park_window: % of % events are no longer in the log, or their ids are those of other rows',
            wanted - parked - former_rows, wanted;
    end if;
    dead := case when reason is not null then parked else coalesce(cardinality(fault_ids), 0) end;
    due_in := (select extract(epoch from min(d.due_at) - clock_timestamp()) from outbox.delivery d
                where d.sink = sink_name and d.id = any (ids) and not d.ready and d.state = 'waiting');
    insert into outbox.progress (
        sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id
    )
    select sink_name, array_agg(f.shard order by f.shard), array_agg(f.epoch order by f.shard),
           case when upto is null then end_a_seq else a_seq end,
           case when upto is null then end_a_snapshot else a_snapshot end,
           case when upto is null then end_a_next else a_next end,
           case when upto is null then end_b_seq else b_seq end,
           case when upto is null then end_b_snapshot else b_snapshot end,
           case when upto is null then end_b_next else b_next end,
           case when upto is null then end_last else upto end
      from unnest(shards, epochs) f (shard, epoch) where f.shard = any (passed);
end
$$;
