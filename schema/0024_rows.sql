-- Sinks with claim = "rows": a queue of rows in which priority and tenant have an effect. Relays made for version 2 work on
-- this schema until the first such sink is registered.

do $$
declare
    tries constant integer := 10;
    patience constant integer := (select s.setting::integer from pg_settings s where s.name = 'deadlock_timeout');
    lock_timeout_before constant text := current_setting('lock_timeout');
begin
    for attempt in 1..tries loop
        begin
            perform set_config('lock_timeout', greatest(patience / 2, 1)::text, true);
            lock table outbox.sink in access exclusive mode;
            perform set_config('lock_timeout', greatest(patience / 20, 1)::text, true);
            lock table outbox.delivery in access exclusive mode;
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

alter table outbox.sink add column claim text not null default 'log' check (claim in ('log', 'rows'));
comment on column outbox.sink.claim is 'rows: each event becomes a row of outbox.delivery, claimed by its priority.';
alter table outbox.delivery
    add column tenant text collate "C",
    add column ready boolean;
comment on column outbox.delivery.tenant is
    'Whose turn it is, for sinks with fair_by = "tenant": the tenant of the event, or empty. Null: the row is of another sink.';
comment on column outbox.delivery.ready is
    'True: in the queue of a sink with claim = "rows". False: in it once it is due. Null: the row is of another sink.';

-- Rows of other sinks, dead ones, those that are not due, and those that may kill a relay are in neither index of the queue.
-- Every other row is in one of them, because the second one would cost as much as the first.
create index delivery_queue on outbox.delivery (sink, priority desc, due_at, id)
 where ready and state = 'waiting' and not suspect and tenant is null;
create index delivery_tenant on outbox.delivery (sink, tenant, priority desc, due_at, id)
 where ready and state = 'waiting' and not suspect and tenant is not null;
create index delivery_later on outbox.delivery (sink, due_at, id) where not ready and state = 'waiting';

-- ---------------------------------------------------------------------------------------------------------
-- Registration
-- ---------------------------------------------------------------------------------------------------------

-- True if a sink may get another `claim`: no relay serves it, and none of its rows is to be delivered. Rows of the one kind have
-- no place in the queue of the other. With the shards locked, so that no settlement that makes rows is under way, and none of
-- a relay whose lease lapsed comes later.
create function outbox.may_change_claim(sink_name text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from outbox.shard s where s.sink = sink_name order by s.shard for update;
    if exists (select from outbox.shard s where s.sink = sink_name and s.owner is not null and s.lease_until > clock_timestamp())
       or exists (select from outbox.delivery d where d.sink = sink_name and d.state = 'waiting')
       or exists (select from outbox.delivery d where d.sink = sink_name and d.state = 'held') then
        return false;
    end if;
    update outbox.shard s set owner = null, epoch = s.epoch + 1 where s.sink = sink_name and s.owner is not null;
    return true;
end
$$;

-- As in version 5, with `claim`, which counts like the patterns: relays with another one are of an older generation, and
-- drain. A sink that cannot get another claim stays as it is, and is answered by generation 0 and no pattern. So is one with
-- claim = "rows" to a relay made for an earlier version, which does not name it: such a relay does not serve it.
create or replace function outbox.register_sinks(
    wanted jsonb, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint, only_from bigint default null
) returns table (name text, generation bigint, patterns text[])
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    first boolean;
    sink record;
    beginning boolean;
    rebased outbox.meta;
    counter bigint;
begin
    lock table outbox.sink in share row exclusive mode;
    first := not exists (select from outbox.sink) and not exists (select from outbox.former_sink);
    for sink in
        select w.name, array(select jsonb_array_elements_text(w.patterns)) as patterns, w.start,
               coalesce(w.claim, 'log') as claim
          from jsonb_to_recordset(wanted) w (name text, patterns jsonb, start text, claim text)
         where w.claim is not null
            or not exists (select from outbox.sink s where s.name = w.name and s.claim = 'rows')
    loop
        if exists (select from outbox.sink s
                    where s.name = sink.name
                      and (s.patterns <> sink.patterns or s.claim <> sink.claim)
                      and s.generation = coalesce(only_from, s.generation)) then
            if not exists (select from outbox.sink s where s.name = sink.name and s.claim <> sink.claim)
               or outbox.may_change_claim(sink.name) then
                counter := outbox.raise_config();
                update outbox.sink s set patterns = sink.patterns, generation = counter, claim = sink.claim
                 where s.name = sink.name;
            end if;
        elsif only_from is null and not exists (select from outbox.sink s where s.name = sink.name)
              and not exists (select from outbox.former_sink f where f.name = sink.name) then
            beginning := coalesce(sink.start = 'beginning', first);
            -- Rows that were written for a removed sink of this name after its removal.
            perform outbox.delete_rows(sink.name);
            delete from outbox.progress p where p.sink = sink.name;
            delete from outbox.shard s where s.sink = sink.name;
            counter := outbox.raise_config();
            select * into rebased from outbox.meta m;
            insert into outbox.sink (name, patterns, generation, start, named_at, claim)
            values (sink.name, sink.patterns, counter, case when beginning then 'beginning' else 'now' end,
                    (select n.at from outbox.name_end n where n.name = sink.name), sink.claim);
            insert into outbox.shard (sink, shard, epoch)
            select sink.name, n, counter << 32 from generate_series(0, 63) n;
            insert into outbox.progress (
                sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id
            )
            select sink.name, array(select generate_series(0, 63)), array_fill(counter << 32, array[64]),
                   case when beginning then 0 else tick_seq end,
                   case when beginning then '3:3:'::pg_snapshot else tick_snapshot end,
                   case when beginning then 3 else tick_next end,
                   case when beginning and rebased.floor > 0 then rebased.floor end,
                   case when beginning and rebased.floor > 0
                        then '9223372036854775807:9223372036854775807:'::pg_snapshot end,
                   case when beginning and rebased.floor > 0 then rebased.floor_xid end,
                   0;
            perform outbox.begin_passes(sink.name, 'start');
        end if;
    end loop;
    update outbox.meta m set min_relay = 24
     where m.min_relay < 24 and exists (select from outbox.sink s where s.claim = 'rows');
    return query
        with asked as (
            select w.name, coalesce(w.claim, 'log') as claim from jsonb_to_recordset(wanted) w (name text, claim text)
        )
        select s.name, case when s.claim = a.claim then s.generation else 0 end,
               case when s.claim = a.claim then s.patterns else '{}' end
          from outbox.sink s join asked a on a.name = s.name
        union all
        select f.name, 0::bigint, '{}'::text[] from outbox.former_sink f
         where only_from is null
           and f.name in (select a.name from asked a)
           and not exists (select from outbox.sink s where s.name = f.name);
end
$$;

-- A dead row that is to be delivered again has its place in the queue of its sink.
create function outbox.row_revived() returns trigger
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    new.ready := (select true from outbox.sink k where k.name = new.sink and k.claim = 'rows');
    return new;
end
$$;

create trigger row_revived before update of state on outbox.delivery
for each row when (old.state = 'dead' and new.state <> 'dead') execute function outbox.row_revived();

-- ---------------------------------------------------------------------------------------------------------
-- Parking
-- ---------------------------------------------------------------------------------------------------------

-- Make rows of the next events of a window, in id order, and move the positions of their shards with them. The read is that
-- of outbox.read_rest, or with `late` of outbox.read_late; payloads stay in the database. `shards` are owned by `owner_id` at
-- `epochs`. Otherwise nothing is written, and `mine` is false.
--
-- `upto` is the last id that was read, null if the read was complete. The position is then that of `end_…`, otherwise the one
-- in the same window behind `upto`. `passed` are the shards whose positions were written; those of shards without an event
-- stay. `parked` counts rows, `dead` those of events that no relay can deliver, `due_in` is the number of seconds until the
-- next of the others is due if it is not yet.
--
-- With `reason`, rows are dead for it and have no payload: the event could not be parked in another way.
create function outbox.park_window(
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
    stored integer;
    wanted integer;
begin
    perform outbox.only_at(server);
    mine := true;
    passed := '{}';
    parked := 0;
    dead := 0;
    if late then
        select array_agg(r.id order by r.id) filter (where r.shard >= 0), array_agg(distinct r.shard) filter (where r.shard >= 0),
               array_agg(r.id order by r.id) filter (where r.fault is not null),
               array_agg(r.fault order by r.id) filter (where r.fault is not null),
               min(r.created_at) filter (where r.shard >= 0), max(r.created_at) filter (where r.shard >= 0),
               max(r.id) filter (where r.shard < 0),
               sum(coalesce(octet_length(r.payload), 0) + coalesce(octet_length(r.key), 0)
                   + coalesce(octet_length(r.headers), 0))
          into ids, passed, fault_ids, faults, earliest, latest, scan_end, bytes
          from outbox.read_late(shards, types, a_snapshot, a_next, b_snapshot, after_id, upto_id, most_rows, most_bytes,
                                most_payload) r;
    else
        select array_agg(r.id order by r.id), array_agg(distinct r.shard),
               array_agg(r.id order by r.id) filter (where r.fault is not null),
               array_agg(r.fault order by r.id) filter (where r.fault is not null),
               min(r.created_at), max(r.created_at), null,
               sum(coalesce(octet_length(r.payload), 0) + coalesce(octet_length(r.key), 0)
                   + coalesce(octet_length(r.headers), 0))
          into ids, passed, fault_ids, faults, earliest, latest, scan_end, bytes
          from outbox.read_rest(shards, types, a_snapshot, b_snapshot, after_id, upto_id, most_rows, most_bytes,
                                most_payload) r;
    end if;
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
    insert into outbox.delivery (
        sink, id, shard, state, ordered, due_at, ready, priority, tenant, last_error,
        uid, type, key, payload, content_type, headers, deliver_at, created_at, emitter
    )
    select sink_name, n.id, n.shard,
           case when n.fault is null then 'waiting' else 'dead' end, false, n.due_at,
           n.due_at <= clock_timestamp(), n.priority, n.tenant, n.fault,
           n.uid, n.type, n.key, n.payload, n.content_type, n.headers, n.deliver_at, n.created_at, n.emitter
      from (
        select e.id, e.shard, e.uid, e.type, case when octet_length(e.key) <= 1024 then e.key end as key,
               case when reason is null then e.payload end as payload, e.content_type,
               case when reason is null then e.headers end as headers, coalesce(c.deliver_at, e.deliver_at) as deliver_at,
               e.created_at, e.emitter, coalesce(e.priority, 0) as priority,
               case when fair then case when octet_length(e.tenant) <= 255 then e.tenant else '' end end as tenant,
               coalesce(reason, (select f.fault from unnest(fault_ids, faults) f (id, fault) where f.id = e.id)) as fault,
               case when e.deliver_at > e.created_at
                    then greatest(first_time, least(coalesce(c.deliver_at, e.deliver_at), last_time))
                    else now() end as due_at
          from outbox.event e
          left join lateral (
            select s.uid, s.deliver_at from outbox.scheduled_change s
             where e.deliver_at is not null and s.uid = e.uid and (s.created_at = e.created_at) is true  -- not by its index
          ) c on true
         where e.id = any (ids)
           and e.created_at >= case when earliest <= first_time then '-infinity' else earliest end
           and e.created_at <= case when latest >= last_time then 'infinity' else latest end
           and not outbox.is_erased(e.content_type, e.payload)
           and (c.uid is null or c.deliver_at is not null)
      ) n
    on conflict (sink, id) do nothing;
    get diagnostics parked = row_count;
    wanted := cardinality(ids);
    if parked <> wanted then
        -- By the uid, too: after a restore two events may have the same id.
        select count(*) into stored
          from outbox.delivery d
         where d.sink = sink_name and d.id = any (ids)
           and exists (select from outbox.event e where e.id = d.id and e.uid = d.uid);
        if stored <> wanted then
            stored := stored + outbox.mark_cancelled(sink_name, ids);
        end if;
        if stored <> wanted then
            raise exception 'outbox.park_window: % of % events are no longer in the log, or their ids are those of other rows',
                wanted - stored, wanted;
        end if;
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

-- ---------------------------------------------------------------------------------------------------------
-- Claims
-- ---------------------------------------------------------------------------------------------------------

-- Put rows whose time has come into the queues of their sinks, at most `most` of a sink, and return how many. So are rows that
-- belong to no queue, among the `most` that are due longest: a row that was made, or retried, while its sink was getting another
-- `claim`.
create function outbox.queue_due_rows(most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    sink_name text;
    due bigint[];
    queued integer := 0;
begin
    most := least(greatest(coalesce(most, 1000), 1), 10000);
    for sink_name in select k.name from outbox.sink k where k.claim = 'rows' order by k.name loop
        due := outbox.due_rows(sink_name, most) || array(
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

-- Lock rows of a sink whose time has come and that are not in its queue yet, at most `most`, and return them.
create function outbox.due_rows(sink_name text, most integer) returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
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

-- The next tenants of the queue of a sink behind `after_tenant`, or from the first one on if it is null, up to `upto_tenant`
-- if that is not null, at most `most` of them: with `leased` all, otherwise those with a row that is not leased. It steps from
-- tenant to tenant, so the rows of one cost no more than one row.
create function outbox.next_tenants(
    sink_name text, after_tenant text, upto_tenant text, most integer, leased boolean
) returns text[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    first_tenant text := case
        when after_tenant is null
        then (select d.tenant from outbox.delivery d
               where d.sink = sink_name and d.ready and d.state = 'waiting' and not d.suspect
                 and (leased or d.lease_until is null or d.lease_until <= now())
                 and d.tenant is not null
               order by d.tenant limit 1)
        else (select d.tenant from outbox.delivery d
               where d.sink = sink_name and d.ready and d.state = 'waiting' and not d.suspect and d.tenant > after_tenant
                 and (leased or d.lease_until is null or d.lease_until <= now())
               order by d.tenant limit 1) end;
begin
    return array(
        with recursive queued (tenant) as (
            select first_tenant collate "C"
            union all
            select (select d.tenant from outbox.delivery d
                     where d.sink = sink_name and d.ready and d.state = 'waiting' and not d.suspect and d.tenant > q.tenant
                       and (leased or d.lease_until is null or d.lease_until <= now())
                     order by d.tenant limit 1)
              from queued q where q.tenant is not null and (upto_tenant is null or q.tenant < upto_tenant)
        )
        select q.tenant from queued q
         where q.tenant is not null and (upto_tenant is null or q.tenant <= upto_tenant)
         limit greatest(coalesce(most, 0), 0)
    );
end
$$;

-- Claim rows of the queue of a sink with claim = "rows", as outbox.claim_rows does for other sinks: those of the highest
-- priority first, of these the ones that are due longest. `place` is the order in which they are to be delivered.
--
-- With `fair`, tenants take turns, and their priorities count among their own rows. The walk begins behind `after_tenant`, and
-- each tenant that it meets gets the same number of rows. It continues while it has found no row, up to a bound. `tenant` of
-- each row is where the next walk begins. Without a row, one of shard -1 says that. Its place is 1 if a bound ended the search.
--
-- Rows that are not due are not in the queue. The ones whose time has come are put there first, up to a bound. A row that is
-- met and is due later leaves the queue, so it is met once.
create function outbox.claim_queued(
    sink_name text, owner_id uuid, lease_id uuid, lease_for double precision, most_rows integer, most_bytes bigint,
    most_payload bigint, fair boolean, after_tenant text
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, ordered boolean, attempts integer, claims integer, fault text,
    place integer, tenant text
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
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
                                case when finished and passed = 0 then 0 else 1 end, walk_end;
        end if;
        return;
    end if;
    chosen := array(
        select c.id from (
            select b.id, b.place, sum(b.bytes) over (order by b.place) - b.bytes as before
              from (
                select d.id, array_position(chosen, d.id) as place,
                       case when octet_length(d.payload) > ceiling then 0 else coalesce(octet_length(d.payload), 0) end
                       + coalesce(octet_length(d.key), 0)
                       + case when d.headers is null then 0 else octet_length(d.headers::text) end as bytes
                  from outbox.delivery d
                 where d.sink = sink_name and d.id = any (chosen)
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
    return query
    update outbox.delivery d
       set owner = owner_id, lease = lease_id, lease_until = clock_timestamp() + lease_for * interval '1 second',
           claims = least(d.claims::bigint + counted, 2147483647)::integer
     where d.sink = sink_name and d.id = any (chosen)
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
              array_position(chosen, d.id), case when fair then walk_end end;
end
$$;

-- End these leases of rows that `owner_id` claimed from the queue of a sink in claims without an answer, and count no claim.
-- The rows are looked for where claims find rows first, up to a bound. Others come back when their leases lapse.
create function outbox.give_queued_back(sink_name text, owner_id uuid, lease_ids uuid[]) returns integer
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
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
                 where q.sink = sink_name and q.ready and q.state = 'waiting' and not q.suspect and q.tenant is null
                 order by q.priority desc, q.due_at, q.id limit most
            ) f
             where f.owner = owner_id and f.lease = any (lease_ids)
            union
            select f.id from unnest(outbox.next_tenants(sink_name, null, null, most_tenants, true)) t (tenant)
             cross join lateral (
                select q.id, q.lease, q.owner from outbox.delivery q
                 where q.sink = sink_name and q.tenant = t.tenant and q.ready and q.state = 'waiting' and not q.suspect
                 order by q.priority desc, q.due_at, q.id limit most_of_tenant
            ) f
             where f.owner = owner_id and f.lease = any (lease_ids)));
    get diagnostics given = row_count;
    return given;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Actions
-- ---------------------------------------------------------------------------------------------------------

-- As in version 3, and a sink with claim = "rows" is never too full for it: due rows are its usual state.
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
