-- Give a sink that no relay serves another name, and return the number of its rows. The old name is refused from then on, and
-- the refusal names the new one. All of it is one transaction: a rename that fails changes nothing.
--
-- No relay can claim a shard while this holds all of them. The locks come in this order: replays, whose dead letters may be on
-- their way to the sink; shards, for which this waits for settlements that have passed their fence; rows; sinks, for which other
-- sinks wait. The shards get epochs above all that were given out before: no position counts that a relay writes under either
-- name, though its leases have ended.
create or replace function outbox.rename_sink(sink_name text, new_name text, actor text, reason text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
declare
    most_rows constant integer := 1000000;
    part text;
    relays text;
    moved bigint;
    fence bigint;
    known outbox.former_sink;
    named_since timestamptz;
begin
    perform outbox_internal.begin_action('outbox.rename_sink');
    if (new_name ~ '^[a-z][a-z0-9_]{0,39}$' and strpos(new_name, '__') = 0) is not true then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s cannot be the name of a sink: it is 1 to 40 of a-z, 0-9 and _, begins with a letter and '
                             'holds no __', coalesce(quote_literal(left(new_name, 60)), 'null'));
    end if;
    if new_name = sink_name then
        raise exception using errcode = 'invalid_parameter_value', message = 'the new name equals the current name';
    end if;
    update outbox.replay r
       set sink = case when r.sink = sink_name then new_name else r.sink end,
           target = case when r.target = sink_name then new_name else r.target end
     where sink_name in (r.sink, r.target);
    perform from outbox.shard s where s.sink = sink_name order by s.shard for update;
    select string_agg(n.name, ', ' order by n.name) into relays
      from (
        select r.name from outbox.relay r
         where sink_name = any (r.sinks) and r.seen_at > clock_timestamp() - interval '30 seconds'
        union
        select coalesce(r.name, s.owner::text)
          from outbox.shard s
          left join outbox.relay r on r.id = s.owner
         where s.sink = sink_name and s.owner is not null and s.lease_until > clock_timestamp()
      ) n;
    if relays is not null then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('sink %s is served by %s: stop these relays, or take the sink out of their files; then rename it, '
                             'and start them with the new name', quote_literal(sink_name), relays);
    end if;
    if (select count(*) from (select from outbox.delivery d where d.sink = sink_name limit most_rows + 1) r) > most_rows then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('sink %s has more than %s rows, which are too many to rename at once: have them delivered, '
                             'or discard some, first', quote_literal(sink_name), most_rows);
    end if;
    if exists (select from outbox.sink k where k.name = sink_name)
       and not exists (select from outbox.sink k where k.name = new_name) then
        delete from outbox.delivery d where d.sink = new_name;
        delete from outbox.discarded m where m.sink = new_name;
        update outbox.delivery d set sink = new_name where d.sink = sink_name;
        get diagnostics moved = row_count;
        -- After the rows: who discards one holds it locked until the mark is committed.
        update outbox.discarded m set sink = new_name where m.sink = sink_name;
    end if;
    lock table outbox.sink in share row exclusive mode;
    select k.named_at into named_since from outbox.sink k where k.name = sink_name;
    if not found then
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
    fence := outbox_internal.raise_config() << 32;
    update outbox.sink k
       set name = new_name, named_at = case when known.renamed_to = sink_name then known.named_at else clock_timestamp() end
     where k.name = sink_name;
    foreach part in array array['shard', 'progress', 'sink_route', 'notice', 'history'] loop
        -- What was written for an earlier sink of the new name goes first.
        execute format('delete from outbox.%I t where t.sink = $1', part) using new_name;
        execute format('update outbox.%I t set sink = $2 where t.sink = $1', part) using sink_name, new_name;
    end loop;
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select new_name, array_agg(p.shard order by p.shard), array_agg(greatest(p.epoch + 1, fence) order by p.shard),
           p.a_seq, p.a_snapshot::text::pg_snapshot, p.a_next, p.b_seq, p.b_snapshot::text::pg_snapshot, p.b_next, p.last_id
      from outbox.standing p
     where p.sink = new_name
     group by p.a_seq, p.a_snapshot::text, p.a_next, p.b_seq, p.b_snapshot::text, p.b_next, p.last_id;
    update outbox.shard s set owner = null, epoch = greatest(s.epoch + 1, fence) where s.sink = new_name;
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

-- Give up to `most` dead letters of a replay to its target, and return how many there were: only those that the replay's
-- position has passed, so that none is read again, and the target's, which would take such a row for one of its own first
-- delivery. Where the target has a row of the event, that one stays. They take part in no order: no live event waits
-- behind them.
-- Each dead letter leaves an exception.
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
