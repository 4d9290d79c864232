-- Cancel a scheduled event in the caller's transaction. True: no sink will deliver it once that is committed. False: it was
-- too late, or there is no such event, and nothing has changed.
create or replace function outbox.cancel(uid uuid) returns boolean
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select outbox_internal.change_scheduled(uid, null, 'outbox.cancel')
$$;
comment on function outbox.cancel is
    'Cancel a scheduled event in the caller''s transaction. True: no sink will deliver it once that is committed. False: it '
    'was too late, or there is no such event.';

-- Move a scheduled event to another time in the caller's transaction, and return whether that was in time, as outbox.cancel
-- does. A time that has passed makes it due at once.
create or replace function outbox.reschedule(uid uuid, at timestamptz) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if at is null or at not between '0001-01-01 00:00:00+00' and '9998-12-31 23:59:59.999999+00' then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('outbox.reschedule: at must be in the years 1 to 9998 (UTC); this one is %s',
                             coalesce(at::text, 'null: outbox.cancel cancels an event'));
    end if;
    return outbox_internal.change_scheduled(uid, at, 'outbox.reschedule');
end
$$;
comment on function outbox.reschedule is
    'Move a scheduled event to another time in the caller''s transaction, and return whether that was in time. A time that '
    'has passed makes it due at once.';

-- Change a scheduled event of the calling role, and return whether that was in time: true if it had not become due, and no sink
-- has tried to deliver it. `new_time` null cancels it.
create or replace function outbox_internal.change_scheduled(wanted uuid, new_time timestamptz, called text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    most constant integer := 1000;  -- of the locks that the whole server has room for
    -- Anything may have been set as a default of the role.
    counted constant text := current_setting('outbox.scheduled_changes', true);
    changes constant integer := case when counted collate "C" ~ '^[0-9]{1,4}$' then counted::integer else 0 end;
    me constant text := outbox_internal.emitter();
    event record;
    changed_to timestamptz;
    is_changed boolean;
begin
    if wanted is null then
        raise exception using errcode = 'invalid_parameter_value', message = format('%s: uid must not be null', called);
    end if;
    select e.emitter, e.deliver_at, e.created_at into event from outbox_internal.scheduled_event(wanted) e;
    -- An event that was due when it was emitted is delivered from the log, where no sink looks for a change.
    if event.deliver_at is null or event.deliver_at <= event.created_at then
        return false;
    end if;
    if event.emitter is distinct from me then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s: event %s was emitted by %s, and this is role "%s"', called, wanted,
                             coalesce('role "' || event.emitter || '"', 'an unknown role'), me);
    end if;
    if changes >= most then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s: a transaction can change at most %s scheduled events: commit, and go on in another one',
                             called, most);
    end if;
    perform set_config('outbox.scheduled_changes', (changes + 1)::text, true);
    perform pg_advisory_xact_lock(outbox_internal.uid_lock(wanted));
    select c.deliver_at into changed_to from outbox.scheduled_change c where c.uid = wanted and c.created_at = event.created_at;
    is_changed := found;
    if is_changed and changed_to is null then
        return new_time is null;
    end if;
    if coalesce(changed_to, event.deliver_at) <= clock_timestamp()
       or exists (select from outbox.delivery d
                   where d.uid = wanted and d.created_at = event.created_at
                     and (d.state <> 'waiting' or d.attempts > 0 or d.claims > 0 or d.lease is not null
                          or d.last_attempt_at is not null)) then
        return false;
    end if;
    insert into outbox.scheduled_change as c (uid, created_at, deliver_at, emitter)
    values (wanted, event.created_at, new_time, me)
        on conflict (uid) do update
       set created_at = excluded.created_at, deliver_at = excluded.deliver_at, emitter = excluded.emitter,
           changed_at = excluded.changed_at, looks = 0, look_at = excluded.look_at;
    if new_time is null then
        -- The next event with its unique key is a new one, in this transaction too.
        delete from outbox.unique_key k where k.uid = wanted;
    end if;
    return true;
end
$$;

-- Return the scheduled event with a uid: from the log or, once its day is emptied, from a row. No other days of the log are
-- locked than the one in which the uid was made or first used: emptying a day waits for every lock on it.
create or replace function outbox_internal.scheduled_event(wanted uuid, out emitter text, out deliver_at timestamptz, out created_at timestamptz)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
    made_at timestamptz := case when get_byte(uuid_send(wanted), 6) >> 4 = 7 then
        to_timestamp(('x' || encode(substring(uuid_send(wanted) from 1 for 6), 'hex'))::bit(48)::bigint / 1000.0) end;
    ids constant bigint[] := array[outbox_internal.id_in(wanted), (select u.id from outbox.uid u where u.uid = wanted)];
    earliest timestamptz;
    latest timestamptz;
begin
    for attempt in 1..2 loop
        if made_at is not null then
            earliest := made_at - interval '10 minutes';
            latest := made_at + case when attempt = 1 then interval '10 minutes' else interval '1 hour' end;
            select pg_get_userbyid(e.emitter)::text, e.deliver_at, e.created_at into emitter, deliver_at, created_at
              from outbox.event e
             where e.id = any (ids) and e.uid = wanted and e.created_at >= earliest and e.created_at <= latest
             order by e.id + 0 desc limit 1;
            if found then
                return;
            end if;
        end if;
        -- A uid that the caller chose may have any time, or none.
        made_at := (select u.created_at from outbox.uid u where u.uid = wanted);
    end loop;
    select pg_get_userbyid(d.emitter)::text, d.deliver_at, d.created_at into emitter, deliver_at, created_at
      from outbox.delivery d
     where d.uid = wanted and d.sink < '~' and outbox_internal.is_untouched(d)
     order by d.id desc limit 1;
end
$$;

-- Delete rows of cancelled events, with a mark for each, and return how many. To be called with the rows locked.
create or replace function outbox_internal.drop_cancelled(ids bigint[], sinks text[]) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    dropped bigint;
begin
    with gone as (
        delete from outbox.delivery d using unnest(ids, sinks) w (id, sink)
         where d.id = w.id and d.sink = w.sink
        returning d.id, d.sink, d.uid, d.created_at
    ),
    marked as (
        insert into outbox.discarded (sink, id, uid, role_name, reason)
        select g.sink, coalesce(e.id, g.id), g.uid, c.emitter, 'cancelled'
          from gone g
          join outbox.scheduled_change c on c.uid = g.uid
          left join lateral (
            select l.id from outbox.event l
             where l.id = any (array[g.id, (select u.id from outbox.uid u where u.uid = g.uid)])
               and l.uid = g.uid and l.created_at = g.created_at limit 1
          ) e on true
            on conflict do nothing
    )
    select count(*) into dropped from gone;
    return dropped;
end
$$;

-- Carry out changes on rows that were made before, at most `most` changes, and return how many were looked at. Each change is
-- looked at twice, the second time a minute later: a row may have been under way to the table without it. From the first change
-- on, no relay of an earlier version begins on this schema.
create or replace function outbox_internal.apply_scheduled_changes(most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
declare
    uids uuid[];
    ids bigint[];
    sinks text[];
begin
    most := least(greatest(coalesce(most, 500), 1), 1000);
    uids := array(select c.uid from outbox.scheduled_change c
                   where c.look_at <= clock_timestamp() order by c.look_at limit most
                     for update skip locked);
    if cardinality(uids) = 0 then
        return 0;
    end if;
    update outbox.meta m set min_relay = 21 where m.min_relay < 21;
    update outbox.delivery d set due_at = c.deliver_at, deliver_at = c.deliver_at
      from (
        select d.id, d.sink, c.deliver_at
          from outbox.scheduled_change c
          join outbox.delivery d on d.uid = c.uid and d.created_at = c.created_at
         where c.uid = any (uids) and c.deliver_at is not null and d.sink < '~' and outbox_internal.is_untouched(d)
           and d.deliver_at is distinct from c.deliver_at
           for update of d skip locked
      ) c
     where d.id = c.id and d.sink = c.sink;
    select array_agg(l.id), array_agg(l.sink) into ids, sinks
      from (
        select d.id, d.sink
          from outbox.scheduled_change c
          join outbox.delivery d on d.uid = c.uid and d.created_at = c.created_at
         where c.uid = any (uids) and c.deliver_at is null and d.sink < '~' and outbox_internal.is_untouched(d)
           for update of d skip locked
      ) l;
    if ids is not null then
        perform outbox_internal.drop_cancelled(ids, sinks);
    end if;
    -- The unique key of a moved event is looked at when the event is due. A cancelled one has given it back.
    update outbox.unique_key k
       set look_at = least(greatest(c.deliver_at, clock_timestamp()), clock_timestamp() + interval '1 hour')
      from (
        select k.uid, c.deliver_at from outbox.scheduled_change c join outbox.unique_key k on k.uid = c.uid
         where c.uid = any (uids) and c.deliver_at is not null
           for update of k skip locked
      ) c
     where k.uid = c.uid;
    update outbox.scheduled_change c
       set looks = c.looks + 1,
           look_at = case when c.looks = 0 then clock_timestamp() + interval '1 minute' end
     where c.uid = any (uids);
    return cardinality(uids);
end
$$;

-- Of scheduled rows that the caller has locked, return those that may be claimed now, at most 100. Others are passed by: their
-- uid is locked by an open transaction that may change them, and they are looked at again in a second; or they have been moved
-- to a later time, or cancelled.
-- As in version 21, and a moved row may be claimed only once it is due in its sink.
create or replace function outbox_internal.take_scheduled(sink_name text, wanted bigint[]) returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    most constant integer := 100;  -- of the locks that the whole server has room for
    tried constant bigint[] := array(
        select d.id from outbox.delivery d where d.sink = sink_name and d.id = any (wanted) order by d.due_at, d.id limit most);
    free bigint[];
    uids uuid[];
    changed bigint[];
    times timestamptz[];
begin
    select array_agg(l.id), array_agg(l.uid) into free, uids
      from (select d.id, d.uid from outbox.delivery d
             where d.sink = sink_name and d.id = any (tried) and pg_try_advisory_xact_lock(outbox_internal.uid_lock(d.uid))) l;
    free := coalesce(free, '{}');
    if cardinality(free) < cardinality(tried) then
        update outbox.delivery d set due_at = clock_timestamp() + interval '1 second'
         where d.sink = sink_name and d.id = any (tried) and d.id <> all (free);
    end if;
    -- With the locks, and so after the commit of every change that was made under them. Two steps: a plan made while there
    -- was no change would go through all of them for each row.
    select array_agg(d.id), array_agg(c.deliver_at) into changed, times
      from (select s.uid, s.created_at, s.deliver_at from outbox.scheduled_change s where s.uid = any (uids) offset 0) c
      join outbox.delivery d on d.sink = sink_name and d.id = any (free) and d.uid = c.uid
                                and (d.created_at = c.created_at) is true;
    if changed is null then
        return free;
    end if;
    update outbox.delivery d set due_at = n.deliver_at, deliver_at = n.deliver_at
      from unnest(changed, times) n (id, deliver_at)
     where d.sink = sink_name and d.id = n.id and n.deliver_at is not null;
    perform outbox_internal.drop_cancelled(array_agg(n.id), array_agg(sink_name))
       from unnest(changed, times) n (id, deliver_at) where n.deliver_at is null
     having count(*) > 0;
    return array(select d.id from outbox.delivery d
                  where d.sink = sink_name and d.id = any (free) and d.due_at <= clock_timestamp());
end
$$;

-- Mark those of these events that have no row, and were cancelled, as discarded; return how many there are.
-- As in version 21, whatever the collation of the database is. A parameter has it, unlike the columns of this schema, and in
-- others than C a "~" comes before letters.
create or replace function outbox_internal.mark_cancelled(sink_name text, ids bigint[]) returns bigint
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

-- Delete changes of events that are neither in the log nor a row, up to `most`, and return how many. Ten times as many are
-- looked at, those that are over longest.
create or replace function outbox_internal.trim_scheduled_changes(most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
declare
    removed integer;
begin
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    delete from outbox.scheduled_change c
     where c.uid = any (array(
            select o.uid
              from (
                select s.uid, s.created_at from outbox.scheduled_change s
                 where s.look_at is null and coalesce(s.deliver_at, s.changed_at) < clock_timestamp()
                 order by coalesce(s.deliver_at, s.changed_at) limit 10 * most
              ) o
             where o.created_at < (select e.created_at from outbox.event e order by e.id limit 1)
               and outbox_internal.event_id(o.uid) is null
               and not exists (select from outbox.delivery d where d.uid = o.uid)
             limit most));
    get diagnostics removed = row_count;
    return removed;
end
$$;

-- The key of the advisory lock on the time of an event.
create or replace function outbox_internal.uid_lock(uid uuid) returns bigint
language sql immutable
return hashtextextended(uid::text collate "C", 1869967971);

-- The reason for which a replay to another sink passes an event by: it is not due, or was cancelled.
create or replace function outbox_internal.not_to_replay(event_uid uuid, emitted_at timestamptz, event_time timestamptz) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when event_time is null then null
                when c.uid is not null and c.deliver_at is null then 'discarded'
                when coalesce(c.deliver_at, event_time) > now() then 'not due' end
      from (values (1)) one (n)
      left join outbox.scheduled_change c on c.uid = event_uid and c.created_at = emitted_at
$$;

