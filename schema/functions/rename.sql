-- Give a sink another name, with its rows, marks, shards and positions, and let the old name lead to it. Returns how many
-- rows were moved. All rows move in one transaction, so no row is ever under another name than its sink, and a rename that
-- fails changes nothing. With more than 10,000 rows this takes seconds, for which relays would wait behind the locks of the
-- rows: such a sink is renamed only while it is paused and no relay holds one of its shards. With more than 100,000 it is
-- refused.
--
-- Most rows are moved before any lock that other sinks wait for; those that settlements have written meanwhile after it.
-- The shards keep their owners, at epochs above all that were given out before: nothing that is still written under the
-- old name, or was left under the new one, counts. An owner that knows redirects takes its shards back under the new name
-- as soon as it has stopped under the old one; no other relay delivers before. Positions are written again, at those epochs.
create or replace function outbox.rename_sink(sink_name text, new_name text, actor text, reason text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
declare
    most_served constant integer := 10000;
    most_rows constant integer := 100000;
    present bigint;
    moved bigint := 0;
    fence bigint;
    known outbox.former_sink;
    named_since constant timestamptz := (select k.named_at from outbox.sink k where k.name = sink_name);
begin
    perform outbox_internal.end_when_idle();
    perform outbox_internal.require_read_committed('outbox.rename_sink');
    perform outbox_internal.check_sink_name(new_name);
    if new_name = sink_name then
        raise exception using errcode = 'invalid_parameter_value', message = 'the new name equals the current name';
    end if;
    if exists (select from outbox.sink k where k.name = sink_name)
       and not exists (select from outbox.sink k where k.name = new_name) then
        select count(*) into present
          from (
            (select from outbox.delivery d where d.sink = sink_name and d.state = 'dead' limit most_rows + 1)
            union all
            (select from outbox.delivery d where d.sink = sink_name and d.state = 'waiting' limit most_rows + 1)
            union all
            (select from outbox.delivery d where d.sink = sink_name and d.state = 'held' limit most_rows + 1)
          ) r;
        if present > most_rows then
            raise exception using errcode = 'invalid_parameter_value',
                message = format('sink %s has more than %s rows, which are too many to rename at once: have them delivered, '
                                 'or discard some, first', quote_literal(sink_name), most_rows);
        elsif present > most_served and (
            exists (select from outbox.sink k where k.name = sink_name and not k.paused)
            or exists (select from outbox.shard s
                        where s.sink = sink_name and s.owner is not null and s.lease_until > clock_timestamp())) then
            raise exception using errcode = 'object_in_use',
                message = format('sink %s has more than %s rows, and relays serve it: pause it, and rename it once no relay '
                                 'holds a shard of it', quote_literal(sink_name), most_served);
        end if;
        perform outbox_internal.delete_rows(new_name);
        delete from outbox.discarded m where m.sink = new_name;
        moved := outbox_internal.move_rows(sink_name, new_name);
    end if;
    lock table outbox.sink in share row exclusive mode;
    if not exists (select from outbox.sink k where k.name = sink_name) then
        perform outbox_internal.require_sink(sink_name);
    end if;
    if exists (select from outbox.sink k where k.name = new_name) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('there is a sink %s already: remove it first, or choose another name', quote_literal(new_name));
    end if;
    select * into known from outbox.former_sink f where f.name = new_name;
    if known.renamed_to <> sink_name then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s is a former name of sink %s: run outbox-relay sinks remove %s --forget first',
                             quote_literal(new_name), quote_literal(known.renamed_to), new_name);
    end if;
    perform from outbox.shard s where s.sink = sink_name order by s.shard for update;
    fence := outbox_internal.raise_config() << 32;
    delete from outbox.sink_route r where r.sink = new_name;
    update outbox.sink_route r set sink = new_name where r.sink = sink_name;
    insert into outbox.sink
    select (jsonb_populate_record(k, jsonb_build_object('name', new_name, 'named_at',
                case when known.renamed_to = sink_name then known.named_at
                     else (select n.at from outbox.name_end n where n.name = new_name) end))).*
      from outbox.sink k where k.name = sink_name;
    update outbox.shard s set sink = new_name, epoch = greatest(s.epoch + 1, fence) where s.sink = sink_name;
    -- Before the last rows are moved: it waits for a session that gives dead letters of a replay to the old name.
    perform outbox_internal.follow_rename(sink_name, new_name);
    delete from outbox.progress p where p.sink = new_name;
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select new_name, array_agg(p.shard order by p.shard), array_agg(s.epoch order by p.shard),
           p.a_seq, p.a_snapshot::text::pg_snapshot, p.a_next, p.b_seq, p.b_snapshot::text::pg_snapshot, p.b_next, p.last_id
      from outbox.standing p
      join outbox.shard s on s.sink = new_name and s.shard = p.shard
     where p.sink = sink_name
     group by p.a_seq, p.a_snapshot::text, p.a_next, p.b_seq, p.b_snapshot::text, p.b_next, p.last_id;
    moved := moved + outbox_internal.move_rows(sink_name, new_name);
    delete from outbox.sink k where k.name = sink_name;
    delete from outbox.former_sink f where f.name = new_name;
    update outbox.former_sink f set renamed_to = new_name where f.renamed_to = sink_name;
    insert into outbox.former_sink (name, actor, renamed_to, named_at) values (sink_name, actor, new_name, named_since)
        on conflict (name) do update
       set removed_at = clock_timestamp(), role_name = outbox_internal.emitter(), actor = excluded.actor,
           renamed_to = excluded.renamed_to, named_at = excluded.named_at;
    perform outbox_internal.record_action('sinks rename', sink_name, jsonb_build_object('to', new_name), moved, actor, reason);
    return moved;
end
$$;
comment on function outbox.rename_sink is
    'Give a sink another name, with its positions and deliveries, and return the number of deliveries that were moved. '
    'Recorded in outbox.audit.';

-- Move replays, the times of notices and the history from a sink to its new name.
create or replace function outbox_internal.follow_rename(old_name text, new_name text) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    update outbox.replay r
       set sink = case when r.sink = old_name then new_name else r.sink end,
           target = case when r.target = old_name then new_name else r.target end
     where old_name in (r.sink, r.target);
    delete from outbox.notice n where n.sink = new_name;
    update outbox.notice n set sink = new_name where n.sink = old_name;
    select outbox_internal.move_history(old_name, new_name);
$$;

-- Move the rows and marks of a sink to another name, and return how many rows there were. Rows are locked in no order, so
-- that is tried again.
create or replace function outbox_internal.move_rows(sink_name text, new_name text) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    tries constant integer := 5;
    moved bigint;
begin
    for attempt in 1..tries loop
        begin
            update outbox.delivery d set sink = new_name where d.sink = sink_name;
            get diagnostics moved = row_count;
            exit;
        exception when deadlock_detected then
            if attempt = tries then
                raise;
            end if;
        end;
    end loop;
    -- After the rows: who discards one holds it locked until the mark is committed.
    update outbox.discarded m set sink = new_name where m.sink = sink_name;
    return moved;
end
$$;

-- Give up to `most` dead letters of a replay to its target, and return how many there were: only those that the replay's
-- position has passed, so that none is read again, and the target's, which would take such a row for one of its own first
-- delivery. Where the target has a row of the event, that one stays. They take part in no order: no live event waits
-- behind them.
-- As in version 8. Each dead letter leaves an exception.
create or replace function outbox_internal.move_dead(r outbox.replay, most integer) returns integer
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
    name constant text := '~' || r.id;
    floor_now constant bigint := (select m.floor from outbox.meta m);
    dead bigint[];
begin
    -- Each query is small next to the rows: a replay whose dead letters wait for the target has no others to look at.
    dead := array(
        select d.id
          from (select o.id, o.shard from outbox.delivery o where o.sink = name and o.state = 'dead' order by o.id limit most) d
          join outbox_internal.replay_places(r.id) p on p.shard = d.shard and d.id <= p.last_id
          left join lateral (select e.id, e.xid from outbox.event e where e.id = d.id limit 1) e on true
         where e.id is null
            or exists (select from outbox.standing n
                        where n.sink = r.target and n.shard = d.shard
                          and outbox_internal.position_passed(e.id, e.xid, n.a_seq, n.a_snapshot, n.a_next, n.b_snapshot, n.last_id,
                                                     floor_now)));
    delete from outbox.delivery d
     where d.sink = name and d.id = any (dead)
       and exists (select from outbox.delivery o where o.id = d.id and o.sink = r.target);
    update outbox.delivery d set sink = r.target, replay = r.id, ordered = false where d.sink = name and d.id = any (dead);
    insert into outbox.replay_exception (replay, id, outcome)
    select r.id, i.id, 'failed' from unnest(dead) i (id)
        on conflict do nothing;
    return cardinality(dead);
end
$$;

-- Gives the minutes of one name to another, which may have some of its own.
create or replace function outbox_internal.move_history(old_name text, new_name text) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    with moved as (
        delete from outbox.history h where h.sink = old_name returning h.*
    )
    insert into outbox.history as h
    select (jsonb_populate_record(null::outbox.history, to_jsonb(m) || jsonb_build_object('sink', new_name))).*
      from moved m order by m.at
        on conflict (sink, at) do update
       set delivered = h.delivered + excluded.delivered, failed = h.failed + excluded.failed,
           dead = h.dead + excluded.dead,
           end_to_end_p50 = greatest(h.end_to_end_p50, excluded.end_to_end_p50),
           end_to_end_p99 = greatest(h.end_to_end_p99, excluded.end_to_end_p99),
           claim_p99 = greatest(h.claim_p99, excluded.claim_p99),
           settle_p99 = greatest(h.settle_p99, excluded.settle_p99),
           busy_ms = coalesce(h.busy_ms, 0) + coalesce(excluded.busy_ms, 0)
$$;
