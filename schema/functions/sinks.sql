-- Make the sinks of a configuration known, or give them other patterns or another claim under a new generation, all in one
-- transaction, and return the generations and patterns in force. `wanted` is a JSON array of {"name", "patterns": [...],
-- "claim": "log" | "rows" | null, "start": "beginning" | "now" | null}. With `only_from`, only a sink that has this generation is
-- changed; with `only_missing`, only sinks that do not exist are looked at: a relay whose registrations a restore has taken
-- back does not know what other relays have registered since.
--
-- The shards of a new sink and their first position, one tick for all, are written with it. Without `start`, the sinks of
-- the first configuration of a database begin at the beginning of the log, later ones at the tick. After a rebase the
-- beginning lies in the old numbering: its rows are read by a window of their own.
--
-- A sink gets another `claim` only if no relay serves it and none of its rows is to be delivered: those have no place in the
-- other queue. Its shards are locked, so that no settlement that makes rows is under way, and get new epochs, so that none of a
-- relay whose lease lapsed comes later.
--
-- Generation 0, which no sink has, answers for the name of a removed sink and for a sink that cannot get another claim: the
-- relay serves its other sinks.
create or replace function outbox_internal.register_sinks(
    wanted jsonb, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint, only_from bigint default null,
    only_missing boolean default false
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
    if only_missing then
        wanted := (select coalesce(jsonb_agg(w.sink), '[]') from jsonb_array_elements(wanted) w (sink)
                    where not exists (select from outbox.sink s where s.name = w.sink ->> 'name'));
    end if;
    first := not exists (select from outbox.sink) and not exists (select from outbox.former_sink);
    for sink in
        select w.name, n.patterns, w.start, w.claim, k.name is not null as is_known, k.claim <> w.claim as changes_claim
          from jsonb_to_recordset(wanted) w (name text, patterns jsonb, start text, claim text)
         cross join lateral (select array(select jsonb_array_elements_text(w.patterns)) as patterns) n
          left join outbox.sink k on k.name = w.name
         where case when k.name is not null
                    then (k.patterns <> n.patterns or k.claim <> coalesce(w.claim, k.claim))
                         and k.generation = coalesce(only_from, k.generation)
                    else only_from is null and not exists (select from outbox.former_sink f where f.name = w.name) end
    loop
        if sink.changes_claim then
            perform from outbox.shard s where s.sink = sink.name order by s.shard for update;
            continue when exists (select from outbox.owned s where s.sink = sink.name)
                or exists (select from outbox.delivery d where d.sink = sink.name and d.state = 'waiting')
                or exists (select from outbox.delivery d where d.sink = sink.name and d.state = 'held');
            update outbox.shard s set owner = null, epoch = s.epoch + 1 where s.sink = sink.name and s.owner is not null;
        end if;
        if not sink.is_known then
            -- Rows that were written for a removed sink of this name after its removal.
            perform outbox_internal.delete_rows(sink.name);
            delete from outbox.progress p where p.sink = sink.name;
            delete from outbox.shard s where s.sink = sink.name;
        end if;
        counter := outbox_internal.raise_config();
        if sink.is_known then
            update outbox.sink s set patterns = sink.patterns, generation = counter, claim = coalesce(sink.claim, s.claim)
             where s.name = sink.name;
            perform outbox_internal.record_routes(sink.name, 'routes');
            continue;
        end if;
        beginning := coalesce(sink.start = 'beginning', first);
        select * into rebased from outbox.meta m;
        insert into outbox.sink (name, patterns, generation, start, claim)
        values (sink.name, sink.patterns, counter, case when beginning then 'beginning' else 'now' end,
                coalesce(sink.claim, 'log'));
        insert into outbox.shard (sink, shard, epoch)
        select sink.name, n, counter << 32 from generate_series(0, 63) n;
        insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
        select sink.name, array(select generate_series(0, 63)), array_fill(counter << 32, array[64]), p.*, 0
          from (
            select tick_seq, tick_snapshot, tick_next, null::bigint, null::pg_snapshot, null::bigint where not beginning
            union all
            select 0, '3:3:', 3, null, null, null where beginning and rebased.floor = 0
            union all
            select 0, '3:3:', 3, rebased.floor, '9223372036854775807:9223372036854775807:', rebased.floor_xid
             where beginning and rebased.floor > 0
          ) p;
        perform outbox_internal.record_routes(sink.name, 'start');
    end loop;
    return query
        select w.name, case when s.claim = coalesce(w.claim, s.claim) then s.generation else 0 end,
               case when s.claim = coalesce(w.claim, s.claim) then s.patterns else '{}' end
          from jsonb_to_recordset(wanted) w (name text, claim text)
          left join outbox.sink s on s.name = w.name
         where s.name is not null
            or only_from is null and exists (select from outbox.former_sink f where f.name = w.name);
end
$$;

-- The patterns of a sink for LIKE; null if one of them matches every type that is not reserved, and no other is needed.
create or replace function outbox_internal.types_of(sink_name text) returns text[]
language sql stable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
    select case when not '*' = any (k.patterns) or 'outbox.*' = any (k.patterns) then array(
               select replace(regexp_replace(p, '([\\%_])', '\\\1', 'g'), '*', '%') from unnest(k.patterns) p) end
      from outbox.sink k where k.name = sink_name
$$;

-- Statements that change sinks by hand raise the counter, too. SECURITY DEFINER: a role that may write sinks need not be
-- able to write the counter.
create or replace function outbox_internal.sink_changed() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox_internal.raise_config();
    return null;
end
$$;

-- Delete what belongs to a sink that is deleted: another sink of its name would take it for its own. Replays to it are
-- cancelled.
--
-- Replays come first: that waits for a session that gives dead letters to the sink, which are then deleted. Shards come
-- before rows, locked in the order in which relays lock them: that waits for settlements that have passed their fence, and
-- none passes it afterwards.
create or replace function outbox_internal.sink_deleted() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    names constant text[] := array(select r.name from removed r);
    cancelled outbox.replay;
begin
    update outbox.replay r set target_gone = true where not r.cleared and r.target = any (names);
    for cancelled in
        update outbox.replay r
           set state = 'cancelled', ended_at = clock_timestamp(), reason = format('sink %s was removed', r.target)
         where r.state in ('running', 'paused') and r.target = any (names)
        returning r.*
    loop
        perform outbox_internal.record_action('replay cancel', cancelled.sink, jsonb_build_object('replay', cancelled.id), 1, null,
                                     cancelled.reason);
    end loop;
    perform from outbox.shard s where s.sink = any (names) order by s.sink, s.shard for update;
    delete from outbox.shard s where s.sink = any (names);
    delete from outbox.session s where s.sink = any (names);
    perform outbox_internal.raise_config();
    perform outbox_internal.delete_rows(n.name) from unnest(names) n (name);
    delete from outbox.progress p where p.sink = any (names);
    delete from outbox.discarded m where m.sink = any (names);
    delete from outbox.notice n where n.sink = any (names);
    delete from outbox.history h where h.sink = any (names);
    delete from outbox.sink_route o where o.sink = any (names);
    return null;
end
$$;

-- Every sink, as an operator wants to see it.
create or replace function outbox.list_sinks(alive_seconds double precision) returns table (
    name text, patterns text[], generation bigint, start text, since timestamptz, paused boolean, paused_reason text,
    relays jsonb
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select k.name, k.patterns, k.generation, k.start, k.created_at, k.paused, k.paused_reason,
           (select coalesce(jsonb_agg(jsonb_build_object('name', r.name, 'serves', r.serves) order by r.name), '[]')
              from outbox_internal.relays_of(k.name, alive_seconds) r)
      from outbox.sink k
     order by k.name
$$;
comment on function outbox.list_sinks is
    'Every sink with its patterns, its pause and the relays that have it, as `outbox-relay sinks` shows it.';

-- The relays that were seen within `seconds` and have this sink in their settings, or serve it: names, and whether they
-- serve it.
create or replace function outbox_internal.relays_of(sink_name text, seconds double precision) returns table (name text, serves boolean)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select r.name, coalesce(sink_name = any (r.sinks), false)
      from outbox.relay r
     where r.seen_at > clock_timestamp() - least(greatest(coalesce(seconds, 30), 0), 86400) * interval '1 second'
       and (sink_name = any (r.sinks)
            or r.config ? format('sinks.%s.type', sink_name))
     order by r.name
$$;

-- Raise unless there is a sink of this name. The message says which sinks there are.
create or replace function outbox_internal.require_sink(sink_name text) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    shown constant text := coalesce(quote_literal(left(sink_name, 60)), 'without a name');
begin
    if exists (select from outbox.sink s where s.name = sink_name) then
        return;
    end if;
    raise exception using errcode = 'no_data_found',
        message = format('there is no sink %s in this database', shown),
        hint = (select coalesce('There are: ' || string_agg(s.name, ', ' order by s.name), 'There is none.')
                  from outbox.sink s);
end
$$;

-- Pause or resume a sink, which relays check once a second, and return whether that changed it. For a resumed sink, the
-- time that its destination was down before does not count towards the next pause. The trigger below records it.
create or replace function outbox.set_paused(
    sink_name text, paused boolean, actor text default null, reason text default null
) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    changed boolean;
begin
    if paused is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'paused must be true or false, not null';
    end if;
    if octet_length(reason) > 2000 then
        raise exception using errcode = 'invalid_parameter_value', message = 'reason must have at most 2000 bytes';
    end if;
    perform outbox_internal.require_sink(sink_name);
    reason := nullif(trim(reason), '');
    perform set_config('outbox.actor', coalesce(actor, ''), true), set_config('outbox.reason', coalesce(reason, ''), true);
    update outbox.sink k
       set paused = set_paused.paused, paused_reason = case when set_paused.paused then reason end,
           circuit_since = case when set_paused.paused then k.circuit_since end
     where k.name = sink_name and k.paused <> set_paused.paused;
    changed := found;
    perform set_config('outbox.actor', '', true), set_config('outbox.reason', '', true);
    return changed;
end
$$;
comment on function outbox.set_paused is
    'Pause or resume a sink, and return whether that changed it. Relays follow within a second or so. Recorded in '
    'outbox.audit.';

-- Have every relay whose circuit of this sink is open send its next event now, and not at the end of its pause. Returns
-- null, or the reason why there is nothing to probe: the sink is `paused`, or its circuit is `closed`, as relays report it.
create or replace function outbox.probe_sink(sink_name text, actor text default null, reason text default null) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    obstacle text;
begin
    perform outbox_internal.require_sink(sink_name);
    update outbox.sink k set probes = k.probes + 1
     where k.name = sink_name and k.circuit <> 'closed' and not k.paused;
    if found then
        perform outbox_internal.record_action('sinks probe', sink_name, null, 1, actor, nullif(trim(reason), ''));
        return null;
    end if;
    select case when k.paused then 'paused' else 'closed' end into obstacle from outbox.sink k where k.name = sink_name;
    return obstacle;
end
$$;
comment on function outbox.probe_sink is
    'Have relays whose circuit of a sink is open send its next event now. Returns null, or why there is nothing to probe. '
    'Recorded in outbox.audit.';

-- Record every pause and resumption, by whatever statement, and tell of it.
create or replace function outbox_internal.sink_paused() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    actor constant text := nullif(current_setting('outbox.actor', true), '');
    reason constant text := coalesce(nullif(current_setting('outbox.reason', true), ''), new.paused_reason);
begin
    perform outbox_internal.record_action(case when new.paused then 'pause' else 'resume' end, new.name, null, 1, actor,
                                 outbox_internal.short_text(reason, 2000));
    perform outbox_internal.notify_state(new.name, 'paused', new.paused, jsonb_build_object(
        'reason', outbox_internal.short_text(reason, 500), 'actor', actor, 'role', outbox_internal.emitter()));
    return null;
end
$$;

-- Remove a sink, and remember its name, so that no relay registers it again; with `forget` the name is free again. Of a
-- sink that is removed already, `forget` forgets the name.
--
-- A sink with `most` rows or more is paused, loses as many of them, and is removed by a later call: each call is short. The
-- shards are locked in the order in which relays lock them: that waits for settlements that have passed their fence, and none
-- passes it meanwhile.
create or replace function outbox.drop_sink(
    sink_name text, forget boolean, most integer, actor text, reason text, audit_id bigint default null,
    out removed boolean, out forgotten boolean, out deliveries bigint, out audit bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
#variable_conflict use_variable
begin
    perform outbox_internal.begin_action('outbox.drop_sink');
    lock table outbox.sink in share row exclusive mode;
    forget := coalesce(forget, false);
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    deliveries := 0;
    removed := false;
    forgotten := false;
    if exists (select from outbox.sink k where k.name = sink_name) then
        perform from outbox.shard s where s.sink = sink_name order by s.shard for update;
        deliveries := outbox_internal.delete_rows(sink_name, most);
        removed := deliveries < most;
        if not removed then
            perform set_config('outbox.actor', coalesce(actor, ''), true);
            update outbox.sink k set paused = true, paused_reason = 'it is being removed: run outbox-relay sinks remove again'
             where k.name = sink_name;
            perform set_config('outbox.actor', '', true);
        else
            delete from outbox.sink k where k.name = sink_name;
            if not forget then
                insert into outbox.former_sink (name, actor) values (sink_name, actor)
                    on conflict (name) do update
                   set removed_at = clock_timestamp(), role_name = outbox_internal.emitter(), actor = excluded.actor;
            end if;
        end if;
    elsif not exists (select from outbox.former_sink f where f.name = sink_name) then
        perform outbox_internal.require_sink(sink_name);
    end if;
    if forget and not exists (select from outbox.sink k where k.name = sink_name) then
        delete from outbox.former_sink f where f.name = sink_name;
        forgotten := found;
    end if;
    if removed or forgotten or deliveries > 0 then
        audit := outbox_internal.record_action(case when forgotten and not removed and audit_id is null then 'sinks forget'
                                           else 'sinks remove' end,
                                      sink_name, jsonb_build_object('forget', forget), deliveries, actor, reason, audit_id);
    end if;
end
$$;
comment on function outbox.drop_sink is
    'Remove a sink with its positions and deliveries; its name stays taken unless `forget` frees it. A large sink takes '
    'several calls. Recorded in outbox.audit.';

-- The losses if a sink is removed: its rows, and its events that are not settled, counted up to `most` and for at most
-- `most_seconds`; and the live relays that have it in their settings.
create or replace function outbox.preview_removal(
    sink_name text, most integer, most_seconds double precision, alive_seconds double precision,
    out deliveries bigint, out undelivered bigint, out exact boolean, out relays text[]
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    backlog record;
    live bigint;
begin
    most := least(greatest(coalesce(most, 10000), 0), 100000);
    lock table outbox.event in access share mode;  -- before the sinks, as outbox.rebase locks them
    perform outbox_internal.require_sink(sink_name);
    select count(*), count(*) filter (where r.state <> 'dead') into deliveries, live
      from (select d.state from outbox.delivery d where d.sink = sink_name limit most + 1) r;
    select b.events, b.exact into backlog
      from outbox_internal.backlog(sink_name, outbox_internal.types_of(sink_name), most, most_seconds) b;
    undelivered := live + backlog.events;
    exact := backlog.exact and deliveries <= most;
    relays := array(select r.name from outbox_internal.relays_of(sink_name, alive_seconds) r);
end
$$;
comment on function outbox.preview_removal is
    'What is lost if a sink is removed: its deliveries and undelivered events; and the live relays that serve it.';

-- Delete the rows of a sink, or `most` of them, found by the indexes of their states, whatever the number of other sinks' rows;
-- return how many.
create or replace function outbox_internal.delete_rows(sink_name text, most integer default null) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    tries constant integer := 5;
    deleted bigint;
begin
    for attempt in 1..tries loop
        begin
            with doomed as (
                (select d.id from outbox.delivery d
                  where d.sink = sink_name and d.state = 'dead' order by d.id limit most)
                union all
                (select d.id from outbox.delivery d
                  where d.sink = sink_name and d.state = 'waiting' order by d.due_at, d.id limit most)
                union all
                (select d.id from outbox.delivery d
                  where d.sink = sink_name and d.state = 'held' order by d.key limit most)
                limit most
            ),
            gone as (
                delete from outbox.delivery d where d.sink = sink_name and d.id = any (array(select o.id from doomed o))
                returning d.id, d.uid
            ),
            marked as (
                -- For as long as the sink is there.
                insert into outbox.discarded (sink, id, uid, reason)
                select sink_name, g.id, g.uid, 'the removal of the sink has begun' from gone g where most is not null
                    on conflict do nothing
            )
            select count(*) into deleted from gone g;
            return deleted;
        exception when deadlock_detected then
            if attempt = tries then
                raise;
            end if;
            perform pg_sleep(0.05 * attempt);  -- without locks on rows: else the other session may wake too late to get its own
        end;
    end loop;
end
$$;

-- Put a sink at another place of the log: 'now', 'beginning', or before the first event that was emitted at or after a
-- time. The tick is taken before the place is looked up: an event with a lower id that is committed between the two is late for
-- the tick, and delivered. Both come before the lock of the sinks, since events are counted meanwhile.
--
-- The fence: epochs above all that were given out, so nothing counts that is still written of the old place; and a new
-- generation, so a relay claims no shard before it has begun again from the stored positions. Owners and leases stay:
-- no other relay delivers a shard while its owner may still be sending. Rows of `delivery` stay, too.
create or replace function outbox.seek_sink(
    sink_name text, target text, actor text, reason text,
    out again bigint, out passed_over bigint, out exact boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
declare
    everything constant pg_snapshot := '9223372036854775807:9223372036854775807:';
    tick record;
    from_id bigint;
    place bigint;
    rebased outbox.meta;
    counter bigint;
begin
    perform outbox_internal.begin_action('outbox.seek_sink');
    lock table outbox.event in access share mode;  -- before the sinks, as outbox.rebase locks them
    perform outbox_internal.require_sink(sink_name);
    tick := outbox_internal.tick();
    from_id := outbox_internal.seek_place(target);
    select c.again, c.passed_over, c.exact into again, passed_over, exact
      from outbox_internal.count_seek(sink_name, from_id, 10000, 2) c;
    lock table outbox.sink in share row exclusive mode;
    perform outbox_internal.require_sink(sink_name);
    perform outbox_internal.require_config(tick.generations);
    perform from outbox.shard s where s.sink = sink_name order by s.shard for update;
    counter := outbox_internal.raise_config();
    select * into rebased from outbox.meta;
    -- Epochs before the generation, so that no owner counts as one that has claimed under the new one.
    update outbox.shard s set epoch = greatest(s.epoch + 1, counter << 32) where s.sink = sink_name;
    insert into outbox.shard (sink, shard, epoch)
    select sink_name, n, counter << 32 from generate_series(0, 63) n on conflict do nothing;
    perform outbox_internal.record_routes(sink_name, 'end');
    update outbox.sink k set generation = counter where k.name = sink_name;
    place := case when from_id - 1 < tick.seq or target = 'beginning' then from_id - 1 end;
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select sink_name, s.shards, s.epochs, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, 0
      from (select array_agg(h.shard order by h.shard) as shards, array_agg(h.epoch order by h.shard) as epochs
              from outbox.shard h where h.sink = sink_name) s
     cross join (
        select tick.seq, tick.snapshot, tick.next_xid, null::bigint, null::pg_snapshot, null::bigint where place is null
        union all
        select place, '3:3:', 3, rebased.floor, everything, rebased.floor_xid where place < rebased.floor
        union all
        select place, '3:3:', 3, tick.seq, tick.snapshot, tick.next_xid where place >= rebased.floor
     ) p (a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next);
    perform outbox_internal.record_routes(sink_name, 'seek');
    perform outbox_internal.record_action('sinks seek', sink_name, jsonb_build_object('to', target), again + passed_over, actor,
                                 reason);
end
$$;
comment on function outbox.seek_sink is
    'Move a sink to another place in the log, to skip events or to deliver them again. Recorded in outbox.audit.';

-- The effect of a seek to `target` ('now', 'beginning' or a time), without the seek.
create or replace function outbox.preview_seek(
    sink_name text, target text, most integer, most_seconds double precision,
    out again bigint, out passed_over bigint, out dead bigint, out discarded bigint, out exact boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    lock table outbox.event in access share mode;  -- before the sinks, as outbox.rebase locks them
    perform outbox_internal.require_sink(sink_name);
    select c.* into again, passed_over, dead, discarded, exact
      from outbox_internal.count_seek(sink_name, outbox_internal.seek_place(target), least(greatest(coalesce(most, 10000), 0), 100000),
                             least(greatest(coalesce(most_seconds, 5), 0), 60)) c;
end
$$;
comment on function outbox.preview_seek is
    'What a seek of a sink would skip or deliver again, counted without moving it.';

-- The place before which a seek puts a sink: 1 for the beginning, null for the end of the log.
create or replace function outbox_internal.seek_place(target text) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if target = 'now' then
        return null;
    elsif target = 'beginning' then
        return 1;
    end if;
    return outbox_internal.first_id_since(outbox_internal.past_time('to', to_jsonb(target), clock_timestamp()), 5);
end
$$;

-- The effect of a seek of a sink to the place before `from_id` (null: the end of the log): how many events are
-- delivered again, how many are passed over, and of those that come again, how many are dead or were discarded. Counts
-- up to `most` and for some seconds.
create or replace function outbox_internal.count_seek(
    sink_name text, from_id bigint, most integer, most_seconds double precision,
    out again bigint, out passed_over bigint, out dead bigint, out discarded bigint, out exact boolean
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    everything constant pg_snapshot := '9223372036854775807:9223372036854775807:';
    no_limit constant bigint := 9223372036854775807;
    span constant bigint := 500000;
    newest constant bigint := coalesce((select max(e.id) from outbox.event e), 0);
    place constant bigint := coalesce(from_id - 1, newest);
    half constant double precision := most_seconds / 2;
    types constant text[] := outbox_internal.types_of(sink_name);
    until timestamptz;
    low bigint := place;
    high bigint;
    counted record;
begin
    select least(b.events, most + 1), b.exact into passed_over, exact
      from outbox_internal.backlog(sink_name, types, most, half, upto => place) b;
    until := clock_timestamp() + half * interval '1 second';
    again := 0;
    while low < newest loop
        high := least(low + span, newest);
        again := again + (
            select count(*) from outbox_internal.read_rest(array(select generate_series(0, 63))::smallint[], types, '3:3:', everything,
                                                  low, high, most + 1, no_limit));
        low := high;
        exit when again > most or clock_timestamp() > until;
    end loop;
    exact := exact and again <= most and low >= newest;
    if again > 0 then
        select least(b.events, most + 1) as events, b.exact into counted
          from outbox_internal.backlog(sink_name, types, most, half, above => place, upto => low) b;
        again := greatest(again - counted.events, 0);
        exact := exact and counted.exact;
    end if;
    select count(*) into dead
      from (select from outbox.delivery d where d.sink = sink_name and d.state = 'dead' and d.id > place limit most) r;
    select count(*) into discarded
      from (select from outbox.discarded m where m.sink = sink_name and m.id > place limit most) r;
end
$$;

-- The lowest id of an event that was emitted at or after a time, by this database's clock; null if there is none. Ids and
-- times are nearly in one order: events of 10 minutes and 20,000 ids before the place are compared one by one, for
-- clocks that were set back and transactions that took their ids early. After `most_seconds` of that the id may be lower.
create or replace function outbox_internal.first_id_since(since timestamptz, most_seconds double precision) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    margin constant interval := '10 minutes';
    margin_ids constant bigint := 20000;
    step constant bigint := 100000;
    until constant timestamptz := clock_timestamp() + most_seconds * interval '1 second';
    low bigint := (select min(e.id) from outbox.event e) - 1;
    high bigint := (select max(e.id) from outbox.event e);
    newest constant bigint := high;
    middle bigint;
    probe record;
    found bigint;
begin
    while high - low > margin_ids loop
        middle := low + (high - low) / 2;
        select e.id, e.created_at into probe from outbox.event e where e.id > middle order by e.id limit 1;
        if probe.created_at < since - margin then
            low := middle;
        else
            high := middle;
        end if;
    end loop;
    low := low - margin_ids;
    while low < newest loop
        select min(e.id) into found
          from outbox.event e
         where e.id > low and e.id <= low + step and e.created_at >= since;
        if found is not null then
            return found;
        end if;
        low := low + step;
        if clock_timestamp() > until then
            return low + 1;
        end if;
    end loop;
    return null;
end
$$;

-- Raise unless the configuration is that of a tick. To be called with the table of sinks locked.
create or replace function outbox_internal.require_config(generations bigint) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if generations <> (select m.config from outbox.meta m) then
        raise exception using errcode = 'serialization_failure',
            message = 'the configuration changed since the tick was taken: try again';
    end if;
end
$$;

-- True if a partition has an event that was committed after a snapshot of this server: of a transaction that ran then,
-- or of one that began since. Ids up to the floor carry numbers of another server; nothing was added to those since the
-- rebase. What began since has a number below the next one, so that such numbers far ahead are not walked through.
create or replace function outbox_internal.came_since(part regclass, snap pg_snapshot) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
declare
    found_one boolean;
begin
    if snap is null then
        return true;
    end if;
    execute format(
        'select exists (select from %1$s e where e.xid = any (array(select pg_snapshot_xip($1))) and e.id + 0 > $2) '
        '    or exists (select from %1$s e where e.xid >= pg_snapshot_xmax($1) '
        '        and e.xid < pg_snapshot_xmax(pg_current_snapshot()) and e.id + 0 > $2)', part)
       into found_one using snap, (select m.floor from outbox.meta m);
    return found_one;
end
$$;
