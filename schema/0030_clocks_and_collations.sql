-- Corrections for databases with a collation other than C, clocks that were set back, events dated in the future, and settings
-- that few sessions have. Relays of earlier versions work on this schema.

-- As in version 21, whatever the collation of the database is. A parameter has it, unlike the columns of this schema, and in
-- others than C a "~" comes before letters.
create or replace function outbox.mark_cancelled(sink_name text, ids bigint[]) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    uids uuid[];
    marked bigint;
begin
    select array_agg(e.uid) into uids from outbox.event e where e.id = any (ids) and e.deliver_at is not null;
    with cancelled as materialized (
        select e.id, e.uid, c.emitter
          from (select s.uid, s.created_at, s.emitter from outbox.scheduled_change s
                 where s.uid = any (uids) and s.deliver_at is null offset 0) c
          join outbox.event e on e.id = any (ids) and e.uid = c.uid and (e.created_at = c.created_at) is true
         where not exists (select from outbox.delivery d where d.sink = sink_name and d.id = e.id)
    ),
    marks as (
        insert into outbox.discarded (sink, id, uid, role_name, reason)
        select sink_name, c.id, c.uid, c.emitter, 'cancelled' from cancelled c where sink_name < '~' collate "C"
            on conflict do nothing
    )
    select count(distinct c.id) into marked from cancelled c;
    return marked;
end
$$;

-- As in version 6, and an event of a later time in the DEFAULT partition, such as one that was emitted while the clock was
-- wrong, keeps no partition of an earlier time from being made. While the DEFAULT partition is large, a call makes one
-- partition: PostgreSQL reads all of DEFAULT for each, and emits wait for the end of the transaction.
create or replace function outbox.make_partitions(days_ahead integer default 3) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set default_tablespace = ''
set default_table_access_method = 'heap'
as $$
declare
    today timestamp := date_trunc('day', clock_timestamp() at time zone 'UTC');
    large constant bigint := 8388608;
    span constant integer := (
        select case when r.keep_days > 31 then least(r.keep_days / 14, 31)
                    when r.keep_days = 0 and r.stated then 31 else 1 end
          from outbox.retention r);
    begins timestamp;
    upto timestamp;
    part text;
    role text;
    made integer := 0;
begin
    perform from outbox.chore c where c.name = 'partitions' for update skip locked;
    if not found then
        return 0;
    end if;
    for begins in select today + n * interval '1 day' from generate_series(0, least(greatest(days_ahead, 1), 30)) n loop
        part := 'event_' || to_char(begins, 'YYYYMMDD');
        continue when to_regclass('outbox.' || part) is not null;
        continue when exists (select from outbox.partitions() p
                               where p.day <> '-infinity' and p.day <= begins and p.upto > begins at time zone 'UTC');
        upto := least(begins + span * interval '1 day',
                      (select min(p.day)::timestamp from outbox.partitions() p where p.day > begins),
                      (select date_trunc('day', d.created_at at time zone 'UTC')
                         from outbox.event_default d
                        where d.created_at >= begins at time zone 'UTC'
                        order by d.created_at limit 1));
        continue when upto <= begins;
        execute format('create table outbox.%I (like outbox.event including defaults including generated)', part);
        perform outbox.keep_no_statistics(to_regclass('outbox.' || part), '{key, payload, headers}');
        for role in
            select distinct case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
              from pg_class c cross join lateral aclexplode(c.relacl) a
             where c.oid = ('outbox.' || part)::regclass and a.grantee <> c.relowner
        loop
            execute format('revoke all on table outbox.%I from %s cascade', part, role);
        end loop;
        execute format('alter table outbox.event attach partition outbox.%I for values from (%L) to (%L)',
                       part, begins at time zone 'UTC', upto at time zone 'UTC');
        made := made + 1;
        exit when pg_relation_size('outbox.event_default') > large;
    end loop;
    return made;
end
$$;

-- The same for attempts, as in version 4.
create or replace function outbox.make_attempt_partitions(days_ahead integer default 3) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set default_tablespace = ''
set default_table_access_method = 'heap'
as $$
declare
    today constant timestamp := date_trunc('day', clock_timestamp() at time zone 'UTC');
    day timestamp;
    part text;
    role text;
    made integer := 0;
begin
    perform from outbox.chore c where c.name = 'attempts' for update skip locked;
    if not found then
        return 0;
    end if;
    for day in
        select today + n * interval '1 day' from generate_series(0, least(greatest(coalesce(days_ahead, 3), 1), 30)) n
    loop
        part := 'attempt_' || to_char(day, 'YYYYMMDD');
        continue when to_regclass('outbox.' || part) is not null;
        continue when exists (
            select from outbox.attempt_default d
             where d.at >= day at time zone 'UTC' and d.at < (day + interval '1 day') at time zone 'UTC');
        execute format('create table outbox.%I (like outbox.attempt including defaults)', part);
        perform outbox.keep_no_statistics(to_regclass('outbox.' || part), '{error, detail}');
        for role in
            select distinct case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
              from pg_class c cross join lateral aclexplode(c.relacl) a
             where c.oid = ('outbox.' || part)::regclass and a.grantee <> c.relowner
        loop
            execute format('revoke all on table outbox.%I from %s cascade', part, role);
        end loop;
        execute format('alter table outbox.attempt attach partition outbox.%I for values from (%L) to (%L)',
                       part, day at time zone 'UTC', (day + interval '1 day') at time zone 'UTC');
        made := made + 1;
    end loop;
    return made;
end
$$;

-- As in version 9. The row that ANALYZE is shown is no dead letter, of which a notice would tell.
create or replace function outbox.renew_key_statistics() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if exists (select from pg_stats s
                where s.schemaname = 'outbox' and s.tablename = 'delivery' and s.attname = 'key') then
        insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at)
        values ('', 0, 0, 'held', false, 'infinity', '00000000-0000-0000-0000-000000000000', '', '', now());
        execute 'analyze outbox.delivery (key)';
        delete from outbox.delivery d where d.sink = '' and d.id = 0;
    end if;
end
$$;

-- As in version 12, whatever a session takes a backslash for.
create or replace function outbox.types_of(sink_name text) returns text[]
language sql stable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
    select case when not '*' = any (k.patterns) or 'outbox.*' = any (k.patterns) then array(
               select replace(regexp_replace(p, '([\\%_])', '\\\1', 'g'), '*', '%') from unnest(k.patterns) p) end
      from outbox.sink k where k.name = sink_name
$$;

-- As in version 27. The offset is legal even if nothing was returned: a plan may look at it first.
create or replace function outbox.read_replayed(
    replay_id bigint, shards smallint[], after_id bigint, upto_id bigint, most_rows integer, most_bytes bigint,
    most_payload bigint
) returns table (
    id bigint, shard smallint, uid text, type text, key text, payload bytea, content_type text, headers text,
    deliver_at timestamptz, created_at timestamptz, fault text
)
language plpgsql stable security definer rows 1000
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_sort = off
set enable_incremental_sort = off
set enable_bitmapscan = off
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
    first_time constant timestamptz := '0001-01-01 00:00:00+00';
    last_time constant timestamptz := '9999-01-01 00:00:00+00';
    r constant outbox.replay := (select p from outbox.replay p where p.id = replay_id);
    ceiling constant bigint := least(most_payload, outbox.payload_ceiling());
    wanted constant smallint[] := array(select s from unnest(shards) s
                                        intersect select s from unnest(outbox.replay_shards(r.key)) s);
    low constant bigint := greatest(after_id, r.from_id);
    high constant bigint := least(upto_id, r.upto_id);
    chosen bigint[];
    passed_ids bigint[];
    passed_shards smallint[];
    reasons text[];
    returned bigint;
begin
    if r.floor is distinct from (select m.floor from outbox.meta m) then
        raise exception using errcode = 'serialization_failure',
            message = format('replay %s has not adopted the last rebase yet', replay_id);
    end if;
    if r.ids is not null then
        select array_agg(c.id) filter (where c.reason is null), array_agg(c.id) filter (where c.reason is not null),
               array_agg(c.shard) filter (where c.reason is not null), array_agg(c.reason) filter (where c.reason is not null)
          into chosen, passed_ids, passed_shards, reasons
          from (
            select e.id, e.shard,
                   case when r.redirected then case when e.deliver_at is not null
                                                     then outbox.not_to_replay(e.uid, e.created_at, e.deliver_at) end
                        when (select true from outbox.delivery d where d.id = e.id and d.sink = r.target) then 'row'
                        when (select m.uid = e.uid from outbox.discarded m where m.sink = r.target and m.id = e.id)
                        then 'discarded' end as reason
              from outbox.event e
             where e.id = any (r.ids) and e.id > low and e.id <= high and e.shard = any (wanted)
               and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                       r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots,
                                       r.a_nexts, r.b_snapshots, r.last_ids)
               and (r.tenant is null or e.tenant = r.tenant)
             order by e.id
             limit most_rows
          ) c;
    else
        select array_agg(c.id) filter (where c.reason is null), array_agg(c.id) filter (where c.reason is not null),
               array_agg(c.shard) filter (where c.reason is not null), array_agg(c.reason) filter (where c.reason is not null)
          into chosen, passed_ids, passed_shards, reasons
          from (
            select e.id, e.shard,
                   case when r.redirected then case when e.deliver_at is not null
                                                     then outbox.not_to_replay(e.uid, e.created_at, e.deliver_at) end
                        when (select true from outbox.delivery d where d.id = e.id and d.sink = r.target) then 'row'
                        when (select m.uid = e.uid from outbox.discarded m where m.sink = r.target and m.id = e.id)
                        then 'discarded' end as reason
              from outbox.event e
             where e.id > low and e.id <= high and e.shard = any (wanted)
               and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                                       r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots,
                                       r.a_nexts, r.b_snapshots, r.last_ids)
               and (r.tenant is null or e.tenant = r.tenant)
             order by e.id
             limit most_rows
          ) c;
    end if;
    return query
    select w.id, w.shard, w.uid::text, w.type, case when w.fault is null or octet_length(w.key) <= 1024 then w.key end,
           case when w.fault is null then w.payload end, w.content_type, w.headers,
           case when w.fault is null or (w.deliver_at >= first_time and w.deliver_at < last_time) then w.deliver_at end,
           greatest(first_time, least(w.created_at, last_time - interval '1 second')), w.fault
      from (
        select f.*, sum(case when f.fault is null then coalesce(octet_length(f.payload), 0) else 0 end
                        + case when f.fault is null or octet_length(f.key) <= 1024
                               then coalesce(octet_length(f.key), 0) else 0 end
                        + coalesce(octet_length(f.headers), 0))
                    over (order by f.id rows between unbounded preceding and 1 preceding) as before
          from (
            select e.id, e.shard, e.uid, e.type, e.key, e.payload, e.content_type, e.deliver_at, e.created_at,
                   case when e.headers is not null and pg_column_size(e.headers) <= 262144 then e.headers::text end as headers,
                   outbox.delivery_fault(e.payload, e.key, e.headers, e.deliver_at, ceiling) as fault
              from outbox.event e
             where e.id = any (chosen)
             order by e.id offset 0
          ) f
      ) w
     where w.before < most_bytes or w.before is null
     order by w.id;
    get diagnostics returned = row_count;
    -- Of a read that was cut by its bytes, those before the last event that it returned.
    return query
    select p.id, p.shard, '', '', null::text, null::bytea, '', null::text, null::timestamptz, now(), p.reason
      from unnest(passed_ids, passed_shards, reasons) p (id, shard, reason)
     where returned = coalesce(cardinality(chosen), 0)
        or p.id < (select c.id from unnest(chosen) c (id) order by c.id offset greatest(returned - 1, 0) limit 1)
     order by p.id;
end
$$;

-- As in version 28. A key whose next look is more than an hour ahead was looked at while the clock was wrong. It is looked at
-- now, since emits with it are merged into an event that may be done.
create or replace function outbox.finish_unique_keys(most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
declare
    few constant integer := 100;
    farthest constant timestamptz := clock_timestamp() + interval '61 minutes';
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
                                where l.uid is null and (l.look_at <= clock_timestamp() or l.look_at > farthest)
                                limit most for update skip locked));
    get diagnostics free = row_count;
    -- Positions that were stored in another cluster do not tell which transactions of this one they have passed: see outbox.tick.
    if (select m.system_identifier from outbox.meta m) is distinct from (select c.system_identifier from pg_control_system() c) then
        return free;
    end if;
    uids := array(select k.uid from outbox.unique_key k
                   where k.look_at <= clock_timestamp() and k.uid is not null order by k.look_at limit most)
            || array(select k.uid from outbox.unique_key k
                      where k.look_at > farthest and k.uid is not null order by k.look_at desc limit few);
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

-- As in version 21, and a row that was there counts although it is finished while this waits or runs, as after a restore or
-- a seek, when an event may be read whose row is there already.
create or replace function outbox.settle(
    sink_name text, owner_id uuid,
    shards smallint[], epochs bigint[], places integer[],
    a_seqs bigint[], a_snapshots pg_snapshot[], a_nexts bigint[],
    b_seqs bigint[], b_snapshots pg_snapshot[], b_nexts bigint[], last_ids bigint[],
    ids bigint[], states text[], ordereds boolean[], due_in double precision[], attempt_counts integer[], claim_counts integer[],
    leases uuid[], lease_for double precision[], errors text[], statuses integer[], last_attempts text[],
    fence_shards smallint[], fence_epochs bigint[]
) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
declare
    mine integer;
    wanted integer;
    added_rows integer;
    former bigint[];
    former_rows integer;
begin
    if cardinality(ids) > 0 then
        select count(*) into mine from (
            select 1 from unnest(fence_shards, fence_epochs) f (shard, epoch)
              join outbox.shard s on s.sink = sink_name and s.shard = f.shard and s.epoch = f.epoch and s.owner = owner_id
             order by s.shard
               for share of s
        ) locked;
        if mine <> cardinality(fence_shards) then
            return false;
        end if;
        select count(distinct r.id) into wanted from unnest(ids) r (id);
        with added as (
            insert into outbox.delivery (
                sink, id, shard, state, ordered, due_at, attempts, claims, lease, lease_until, owner, last_error, last_status,
                last_attempt_at, last_attempt, uid, type, key, payload, content_type, headers, deliver_at, created_at, emitter
            )
            select sink_name, e.id, e.shard, r.state, r.ordered,
                   coalesce(clock_timestamp() + r.due_in * interval '1 second', c.deliver_at, e.deliver_at, clock_timestamp()),
                   r.attempts, r.claims, r.lease, clock_timestamp() + r.lease_for * interval '1 second',
                   case when r.lease is not null then owner_id end, r.error, r.status,
                   case when r.attempts > 0 or r.lease is not null or r.last_attempt is not null then clock_timestamp() end,
                   r.last_attempt::jsonb,
                   e.uid, e.type, e.key, e.payload, e.content_type, e.headers, coalesce(c.deliver_at, e.deliver_at), e.created_at,
                   e.emitter
              from unnest(ids, states, ordereds, due_in, attempt_counts, claim_counts, leases, lease_for, errors, statuses,
                          last_attempts)
                   r (id, state, ordered, due_in, attempts, claims, lease, lease_for, error, status, last_attempt)
              join outbox.event e on e.id = r.id and not outbox.is_erased(e.content_type, e.payload)
              left join lateral (
                select s.uid, s.deliver_at from outbox.scheduled_change s
                 where e.deliver_at is not null and s.uid = e.uid and (s.created_at = e.created_at) is true  -- not by its index
              ) c on true
             where c.uid is null or c.deliver_at is not null
            on conflict (sink, id) do nothing returning id
        ),
        total as (select count(*) as n from added)
        -- The rows that this statement saw before it added any. By the uid, too: after a restore two events may have the
        -- same id. Not joined: a plan made while there was no row would go through all rows of the sink for each id.
        select t.n, case when t.n < wanted
                         then array(select d.id from outbox.delivery d
                                     where d.sink = sink_name and d.id = any (ids) and d.id not in (select a.id from added a)
                                       and exists (select from outbox.event e
                                                    where e.id = d.id and e.uid = d.uid and e.created_at = d.created_at))
                         else '{}' end
          into added_rows, former
          from total t;
        former_rows := cardinality(former);
        if added_rows + former_rows < wanted then
            -- One that has lost its row since, because it was cancelled, is counted already.
            former_rows := former_rows + outbox.mark_cancelled(
                sink_name, array(select i.id from unnest(ids) i (id) where i.id not in (select f.id from unnest(former) f (id))));
        end if;
        if added_rows + former_rows < wanted then
            raise exception 'outbox.settle: % of % events are no longer in the log', wanted - added_rows - former_rows, wanted;
        end if;
    end if;
    if cardinality(shards) > 0 then
        insert into outbox.progress (
            sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id
        )
        select sink_name, t.shards, t.epochs, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, p.last_id
          from unnest(a_seqs, a_snapshots, a_nexts, b_seqs, b_snapshots, b_nexts, last_ids)
               with ordinality p (a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id, place)
         cross join lateral (
            select array_agg(m.shard order by m.shard) as shards, array_agg(m.epoch order by m.shard) as epochs
              from unnest(shards, epochs, places) m (shard, epoch, place) where m.place = p.place
         ) t;
    end if;
    return true;
end
$$;

-- As in version 24, and with rows that were there as in outbox.settle.
create or replace function outbox.park_window(
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
    wanted := cardinality(ids);
    with added as (
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
        on conflict (sink, id) do nothing returning id
    ),
    total as (select count(*) as n from added)
    -- The rows that this statement saw before it added any, as in outbox.settle.
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
        former_rows := former_rows + outbox.mark_cancelled(
            sink_name, array(select i.id from unnest(ids) i (id) where i.id not in (select f.id from unnest(former) f (id))));
    end if;
    if parked + former_rows < wanted then
        raise exception 'outbox.park_window: % of % events are no longer in the log, or their ids are those of other rows',
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

-- As in version 6, and latecomers are looked for by no other index than that of their transactions: where few transactions
-- wrote a day, the planner takes that of ids and shards for smaller, and reads all of the day for each piece.
create or replace function outbox.day_keepers(day date, before timestamptz default 'infinity') returns jsonb
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_variable
declare
    part constant regclass := outbox.part_of(day);
    kept jsonb := '[]';
    sink record;
    piece record;
    behind smallint[];
    there boolean;
begin
    for sink in select k.name, k.paused from outbox.sink k order by k.name loop
        behind := '{}';
        for piece in select * from outbox.unsettled(sink.name) loop
            if piece.late then
                execute format(
                    'select exists (select from %1$s e where e.xid = any (array(select pg_snapshot_xip($1))) '
                    '        and e.id + 0 > $3 and e.id + 0 <= $4 and e.shard + 0 = any ($5) and e.created_at < $6) '
                    '    or exists (select from %1$s e where e.xid >= pg_snapshot_xmax($1) and e.xid < $2::text::xid8 '
                    '        and e.id + 0 > $3 and e.id + 0 <= $4 and e.shard + 0 = any ($5) and e.created_at < $6)', part)
                   into there using piece.a, piece.a_next, piece.after_id, piece.upto_id, piece.shards, before;
            else
                execute format(
                    'select exists (select from %1$s e where e.id > $2 and e.id <= $3 and e.shard = any ($4) '
                    '        and e.created_at < $5 and not pg_visible_in_snapshot(e.xid, $1))', part)
                   into there using piece.a, piece.after_id, piece.upto_id, piece.shards, before;
            end if;
            if there then
                behind := behind || piece.shards;
            end if;
        end loop;
        if cardinality(behind) > 0 then
            kept := kept || jsonb_build_object(
                'kind', 'sink', 'name', sink.name, 'paused', sink.paused,
                'shards', (select count(distinct s) from unnest(behind) s));
        end if;
    end loop;
    return kept || outbox.replay_keepers(part, before) || outbox.day_holders(part, array['RowExclusiveLock']);
end
$$;
