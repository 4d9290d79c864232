-- Take a unique key for the event `new_uid`, and return null; or return the uid of the event that has it. While another
-- transaction has emitted an event with the key and is open, the call waits for its end. A key that is in use is only read:
-- emitters that share it neither wait for each other nor keep a relay from giving it back.
create or replace function outbox_internal.claim_unique_key(event_type text, wanted text, new_uid uuid, claimant text, due timestamptz) returns uuid
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    other uuid;
    owner text;
    owner_oid oid;
    own constant oid := (select r.oid from pg_roles r where r.rolname = claimant);
    -- An event that is scheduled for later is looked at when it is due, and at least once an hour.
    look constant timestamptz := least(greatest(due, clock_timestamp()), clock_timestamp() + interval '1 hour');
begin
    -- A key that was there may be gone before it is read. It is read first: an INSERT would wait for a relay that changes it.
    for attempt in 1..10 loop
        select k.uid, k.emitter, k.emitter_oid into other, owner, owner_oid
          from outbox.unique_key k where k.type = event_type and k.unique_key = wanted;
        if not found then
            insert into outbox.unique_key (type, unique_key, uid, emitter, emitter_oid, look_at)
            values (event_type, wanted, new_uid, claimant, own, look)
                on conflict do nothing;
            if found then
                return null;
            end if;
        elsif other is null then
            update outbox.unique_key k
               set uid = new_uid, emitter = claimant, emitter_oid = own, claimed_at = clock_timestamp(), look_at = look
             where k.type = event_type and k.unique_key = wanted and k.uid is null;
            if found then
                return null;
            end if;
        else
            if owner <> claimant and outbox_internal.is_others(owner, owner_oid) then
                raise exception using errcode = 'invalid_parameter_value',
                    message = format(
                        'outbox.emit: %sunique_key of type %s is in use by role "%s", and this is role "%s": a key belongs to the '
                        'role whose event is not done',
                        coalesce('event ' || nullif(current_setting('outbox.event_index', true), '') || ': ', ''),
                        event_type, owner, claimant);
            end if;
            return other;
        end if;
    end loop;
    raise exception using errcode = 'serialization_failure',
        message = format('a unique_key of type %s was removed while it was looked at: try again', event_type);
end
$$;

-- Lock the unique keys of several events that are free, so that transactions that emit some of the same keys in another order
-- do not wait for each other. Called before outbox.emit_raw by the same statement. Nulls are left out.
create or replace function outbox.lock_unique_keys(types text[], unique_keys text[]) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    wanted record;
    locked integer := 0;
begin
    for wanted in
        select distinct w.type collate "C" as type, w.unique_key collate "C" as unique_key
          from unnest(types, unique_keys) w (type, unique_key)
         where octet_length(w.unique_key) between 1 and 255 and octet_length(w.type) between 1 and 255
         order by 1, 2
    loop
        if not exists (select from outbox.unique_key k where k.type = wanted.type and k.unique_key = wanted.unique_key) then
            insert into outbox.unique_key (type, unique_key, emitter)
            values (wanted.type, wanted.unique_key, outbox_internal.emitter())
                on conflict do nothing;
        end if;
        perform from outbox.unique_key k
          where k.type = wanted.type and k.unique_key = wanted.unique_key and k.uid is null
            for no key update;
        locked := locked + 1;
    end loop;
    return locked;
end
$$;
comment on function outbox.lock_unique_keys is
    'Lock the unique keys of several events before they are emitted, so that transactions that emit some of the same keys '
    'in another order do not wait for each other.';

-- Delete unique keys whose event is done, among at most `most` that are to be looked at, and return how many were deleted. An
-- event that is not done is looked at again in a second. If more than 100 are to be looked at, the next look is in a twentieth
-- of its age if that is longer, up to half a minute, so that a call costs about as much however many keys are in use. A
-- scheduled event is not done; it is looked at when it is due, and at least once an hour. A key whose next look is more than an
-- hour ahead was looked at while the clock was wrong: it is looked at now, since emits with it are merged into an event that may
-- be done.
--
-- Keys are looked at without a lock, because emits wait for it: an event that is done stays done.
create or replace function outbox_internal.finish_unique_keys(most integer) returns integer
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
    -- Positions that were stored in another cluster do not tell which transactions of this one they have passed: see
    -- outbox_internal.tick.
    if outbox_internal.elsewhere() then
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
        select k.uid, k.claimed_at, e.id, e.xid, e.shard, e.type, s.deliver_at as due
          from keys k
          left join outbox.scheduled s on s.uid = k.uid
         cross join lateral (select outbox_internal.event_id(k.uid) as id offset 0) i
          left join lateral (
            select l.id, l.xid, l.shard, l.type
              from outbox.event l
             where l.id = i.id and l.uid = k.uid
             limit 1
          ) e on true
    ),
    readers as materialized (
        select k.name, k.created_at, l.shard, outbox_internal.types_of(k.name) as types, m.floor, p.a_seq,
               p.a_snapshot, p.a_next, p.b_snapshot, p.last_id,
               -- A session that still reads with other patterns.
               o.sink is not null and o.generation is distinct from k.generation as differs,
               p.a_seq is not null and (h.owner is null or p.epoch = h.epoch) as counts
          from outbox.sink k
         cross join outbox.meta m
         cross join (select distinct l.shard from logged l where l.shard is not null) l
          left join outbox.shard h on h.sink = k.name and h.shard = l.shard
          left join outbox.owned o on o.sink = k.name and o.shard = l.shard
          left join outbox.standing p on p.sink = k.name and p.shard = l.shard
    ),
    judged as (
        select l.uid, l.claimed_at, l.due,
               l.due is null
               and not exists (
                    select from outbox.delivery d join outbox.sink k on k.name = d.sink
                     where d.uid = l.uid and d.state <> 'dead' and k.created_at <= l.claimed_at)
               and not exists (
                    select from readers r
                     where r.shard = l.shard and r.created_at <= l.claimed_at
                       and (r.differs or r.types is null or l.type like any (r.types))
                       and not (r.counts and outbox_internal.position_passed(l.id, l.xid, r.a_seq, r.a_snapshot, r.a_next, r.b_snapshot,
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
