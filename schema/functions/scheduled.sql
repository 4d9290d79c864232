-- A scheduled event waits in outbox.scheduled, one row for all sinks, and enters the log when it is due: a relay deletes the row
-- and inserts the event in one statement. From then on it is an event like any other, with the transaction id and the id of its
-- entry. The row lock decides between an entry and a change by the application: whichever comes later finds nothing to do.

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

-- Cancel a scheduled event of the calling role, or move it to `new_time`, and return whether it was still scheduled.
create or replace function outbox_internal.change_scheduled(wanted uuid, new_time timestamptz, called text) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    other text;
begin
    if wanted is null then
        raise exception using errcode = 'invalid_parameter_value', message = format('%s: uid must not be null', called);
    end if;
    if new_time is null then
        delete from outbox.scheduled s where s.uid = wanted and not outbox_internal.is_others(s.emitter, s.emitter_oid);
    else
        update outbox.scheduled s set deliver_at = new_time
         where s.uid = wanted and not outbox_internal.is_others(s.emitter, s.emitter_oid);
    end if;
    if not found then
        select s.emitter into other from outbox.scheduled s
         where s.uid = wanted and outbox_internal.is_others(s.emitter, s.emitter_oid);
        if found then
            raise exception using errcode = 'invalid_parameter_value',
                message = format('%s: event %s was emitted by role "%s", and this is role "%s"', called, wanted, other, outbox_internal.emitter());
        end if;
        return false;
    end if;
    if new_time is null then
        delete from outbox.unique_key k where k.uid = wanted;  -- the next event with the key is a new one
    else
        update outbox.unique_key k
           set look_at = least(greatest(new_time, clock_timestamp()), clock_timestamp() + interval '1 hour')
         where k.uid = wanted;
    end if;
    return true;
end
$$;

-- Let scheduled events that are due enter the log, at most `most` of those behind (`after_time`, `after_id`) in the order of
-- their times, and return how many did, the place of the last one, and the seconds until the next one is due (null: there is
-- none). Events of equal times enter in the order in which they were emitted. Rows that a transaction is changing are passed by.
-- An event gets its id here, after the transaction has its xid; its uid has another one, so outbox.uid gets this id.
--
-- One session does it at a time (`entered` is null while another one does), so that events enter in that order and the window
-- keeps it. The lock is of a table that is never written and that no other role may lock; any role may take an advisory lock.
-- The places that are passed over matter while a snapshot is held: the rows that were deleted since cannot be removed then, and a look
-- from the beginning visits all of them.
create or replace function outbox_internal.enter_scheduled(
    most integer, after_time timestamptz, after_id bigint,
    out entered integer, out last_time timestamptz, out last_id bigint, out due_in double precision
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
    begin
        lock table outbox.secret in exclusive mode nowait;
    exception when lock_not_available then
        return;
    end;
    with gone as materialized (
        delete from outbox.scheduled s
         where s.ctid = any (array(
                select d.ctid from outbox.scheduled d
                 where d.deliver_at <= now() and (d.deliver_at, d.id) > (after_time, after_id)
                 order by d.deliver_at, d.id
                 limit least(greatest(coalesce(most, 1000), 1), 10000)
                   for update skip locked))
        returning s.*
    ),
    added as (
        insert into outbox.event (
            uid, emitter, shard, priority, deliver_at, emitted_at, type, key, tenant, content_type, headers, payload
        )
        select g.uid, to_regrole(quote_ident(g.emitter))::oid, outbox_internal.shard_of(g.key, g.uid), g.priority, g.deliver_at,
               g.created_at, g.type, g.key, g.tenant, g.content_type, g.headers, g.payload
          from gone g
         order by g.deliver_at, g.id
        returning event.uid, event.id
    ),
    known as (
        insert into outbox.uid (uid, id, emitter, emitter_oid)
        select a.uid, a.id, g.emitter, g.emitter_oid from added a join gone g on g.uid = a.uid
         order by a.uid
            on conflict (uid) do update set id = excluded.id
    )
    select count(*), (array_agg(g.deliver_at order by g.deliver_at desc, g.id desc))[1],
           (array_agg(g.id order by g.deliver_at desc, g.id desc))[1]
      into entered, last_time, last_id
      from gone g;
    due_in := (select extract(epoch from s.deliver_at - clock_timestamp()) from outbox.scheduled s
                where s.deliver_at > now() order by s.deliver_at, s.id limit 1);
    if entered > 0 and outbox_internal.asleep() then
        perform pg_notify('outbox', '');
    end if;
end
$$;
