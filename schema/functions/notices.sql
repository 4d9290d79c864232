-- Make a notice in the transaction of what it tells, unless one of its cause was made within the hour; return whether it was
-- made. A notice with a later time than now does not count: the clock has gone back. It never fails that transaction: an error
-- becomes a warning, and no further notice is tried in the transaction.
--
-- The short lock_timeout ends waits for another transaction that makes the same notice, before they become deadlocks.
create or replace function outbox_internal.make_notice(notice_type text, subject text, notice_cause text, details jsonb) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
as $$
declare
    made_at constant timestamptz := clock_timestamp();
    event_id bigint;
    uid uuid;
    key constant text := nullif(subject, '');
    made boolean;
begin
    if current_setting('outbox.notices_failed', true) = 'on'
       or exists (select from outbox.notice n
                   where n.type = notice_type and n.sink = subject and n.cause = notice_cause
                     and n.at > made_at - interval '1 hour' and n.at < made_at + interval '1 minute') then
        return false;
    end if;
    begin
        insert into outbox.notice as n (type, sink, cause, at) values (notice_type, subject, notice_cause, made_at)
            on conflict (type, sink, cause) do update set at = excluded.at
                  where n.at <= excluded.at - interval '1 hour' or n.at >= excluded.at + interval '1 minute';
        made := found;
        if made then
            event_id := nextval('outbox.event_id_seq');  -- the transaction has its xid, by the notice
            uid := outbox_internal.uid_of(event_id);
            insert into outbox.event (id, uid, emitter, shard, type, key, payload)
            values (event_id, uid, outbox_internal.emitter_oid(), outbox_internal.shard_of(key, uid), notice_type, key,
                    convert_to((jsonb_build_object('at', made_at) || jsonb_strip_nulls(details))::text, 'UTF8'));
            delete from outbox.notice n
             where (n.type, n.sink, n.cause) in (
                select o.type, o.sink, o.cause from outbox.notice o
                 where o.type in ('outbox.dead', 'outbox.retention.blocked') and o.at < made_at - interval '1 day'
                 limit 100 for update skip locked);
        end if;
        return made;
    exception
        when others then
            perform set_config('outbox.notices_failed', 'on', true);
            raise warning 'a notice of type % was not written: %', notice_type, sqlerrm;
            return false;
    end;
end
$$;

-- The sink that receives notices, or null: then none is made.
create or replace function outbox_internal.notify_sink() returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select k.name from outbox.sink k where 'outbox.*' = any (k.patterns) order by k.generation desc, k.name limit 1
$$;

-- Tell which sinks lag by `lagging_seconds` or more, and which have recovered: they lag by less than half of it. Tell also
-- of pauses that the hour suppressed. Return the lag of every sink. A paused sink is judged once it is resumed.
create or replace function outbox_internal.notify_sinks(lagging_seconds double precision)
returns table (sink text, seconds double precision, paused boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    k record;
begin
    if (lagging_seconds between 1 and 1e9) is not true then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('lagging_seconds must be 1 to 1000000000, not %s', coalesce(lagging_seconds::text, 'null'));
    end if;
    for k in
        select s.name, s.paused, s.paused_reason, s.circuit, outbox_internal.sink_lag(s.name) as lag
          from outbox.sink s order by s.name
    loop
        perform outbox_internal.notify_state(k.name, 'paused', k.paused, jsonb_build_object(
            'reason', outbox_internal.short_text(k.paused_reason, 500)));
        if not k.paused and (k.lag >= lagging_seconds or k.lag < lagging_seconds / 2) then
            perform outbox_internal.notify_state(k.name, 'lagging', k.lag >= lagging_seconds, jsonb_build_object(
                'lag_seconds', round(k.lag::numeric, 1), 'lagging_seconds', lagging_seconds, 'circuit', k.circuit));
        end if;
        sink := k.name;
        seconds := k.lag;
        paused := k.paused;
        return next;
    end loop;
end
$$;

-- Make the notice that a sink is paused or lags (`cause`), or that it has recovered, unless the last one said the same. A
-- state that lasts gets its notice by a later call if the hour suppresses it now.
create or replace function outbox_internal.notify_state(subject text, state_cause text, bad boolean, details jsonb) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    receiver constant text := outbox_internal.notify_sink();
    bad_type constant text := 'outbox.sink.' || state_cause;
    good_type constant text := 'outbox.sink.recovered';
    bad_at timestamptz;
    good_at timestamptz;
    told boolean;
begin
    if receiver is null or receiver = subject then
        return;
    end if;
    select max(n.at) filter (where n.type = bad_type), max(n.at) filter (where n.type = good_type)
      into bad_at, good_at
      from outbox.notice n
     where n.sink = subject and n.cause = state_cause and n.type in (bad_type, good_type);
    told := coalesce(bad_at > coalesce(good_at, '-infinity'), false);
    if bad and not told then
        perform outbox_internal.make_notice(bad_type, subject, state_cause, jsonb_build_object('sink', subject) || details);
    elsif not bad and told then
        perform outbox_internal.make_notice(good_type, subject, state_cause, jsonb_build_object(
            'sink', subject, 'from', state_cause, 'since', date_trunc('second', bad_at),
            'seconds', round(extract(epoch from clock_timestamp() - bad_at)), 'actor', details -> 'actor'));
    end if;
end
$$;

-- Make the notice of dead letters of a sink and class: the code of the last attempt, its status, or `refused`, which has no text
-- of a destination. `count` are those of this class that died since the last notice of it, in the
-- last hour if there is none; `dead` are all of the sink. Both are counted in the newest thousand dead rows.
create or replace function outbox_internal.notify_dead() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_sort = off
set jit = off
as $$
declare
    most constant integer := 1000;
    receiver constant text := outbox_internal.notify_sink();
    target text;
    class text;
    told_at timestamptz;
    counted_since timestamptz;
    counted record;
begin
    if receiver is null or (tg_op = 'UPDATE' and old.state = 'dead') then
        return null;
    end if;
    target := outbox_internal.sink_of(new.sink);
    class := coalesce(substring(new.last_attempt ->> 'code' from '^[A-Za-z0-9_]{1,60}$'), 'status ' || new.last_status, 'refused');
    told_at := (select n.at from outbox.notice n where n.type = 'outbox.dead' and n.sink = target and n.cause = class);
    if target = receiver or told_at > clock_timestamp() - interval '1 hour' and told_at < clock_timestamp() + interval '1 minute' then
        return null;
    end if;
    counted_since := coalesce(told_at, clock_timestamp() - interval '1 hour');
    select count(*) as dead,
           count(*) filter (
               where d.since >= counted_since
                 and coalesce(substring(d.last_attempt ->> 'code' from '^[A-Za-z0-9_]{1,60}$'), 'status ' || d.last_status,
                              'refused') = class) as recent
      into counted
      from (select o.since, o.last_attempt, o.last_status
              from outbox.delivery o
             where o.sink = new.sink and o.state = 'dead'
             order by o.id desc limit most) d;
    perform outbox_internal.make_notice('outbox.dead', target, class, jsonb_build_object(
        'sink', target, 'reason', class, 'status', new.last_status, 'count', counted.recent, 'dead', counted.dead,
        'exact', counted.dead < most, 'uid', new.uid, 'type', new.type, 'replay', outbox_internal.replay_of(new.sink)));
    return null;
end
$$;
