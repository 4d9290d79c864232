-- Actions on sinks: remove, rename and seek. Every action fences first, and leaves its row of `audit` in the same
-- transaction. All take their locks in one order: the table of sinks, the shards by number, `meta`, then rows. Relays made
-- for version 2 work on this schema.

-- ---------------------------------------------------------------------------------------------------------
-- Names that sinks had
-- ---------------------------------------------------------------------------------------------------------

-- A sink that was removed is not registered again by a relay that still has it in its file. A sink that was renamed is
-- served under its new name: `renamed_to` is always a sink that exists, never another former name. A sink of a name wins
-- over a former one.
create table outbox.former_sink (
    name text collate "C" primary key,
    removed_at timestamptz not null default clock_timestamp(),
    role_name text not null default outbox.emitter(),
    actor text,
    renamed_to text collate "C" check (renamed_to <> name),
    named_at timestamptz
);
comment on column outbox.former_sink.named_at is 'As in outbox.sink, of the sink to which the name leads.';
create index former_sink_renamed_to on outbox.former_sink (renamed_to);

alter table outbox.sink add column named_at timestamptz;
comment on column outbox.sink.named_at is
    'When another sink had this name for the last time: attempts that were recorded before are of that one. Null: none had it.';

-- The time at which a name was last that of a sink.
create table outbox.name_end (
    name text collate "C" primary key,
    at timestamptz not null default clock_timestamp()
);

-- The settings that a relay runs with, as names and values; a secret is an HMAC under the key in `config_key`, so that two
-- can be compared. Null: a relay made for an earlier version.
alter table outbox.relay add column config jsonb;

create table outbox.config_key (
    single boolean primary key default true check (single),
    key bytea not null
);
insert into outbox.config_key (key)
values (decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

-- Raise that there is no sink of this name, with the names that there are.
create function outbox.refuse_sink(sink_name text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    renamed text := (select f.renamed_to from outbox.former_sink f where f.name = sink_name);
begin
    if renamed is not null then
        raise exception using errcode = 'no_data_found',
            message = format('there is no sink %s any more: its name is now %s',
                             quote_literal(left(sink_name, 60)), quote_literal(renamed));
    end if;
    raise exception using errcode = 'no_data_found',
        message = format('there is no sink %s in this database',
                         coalesce(quote_literal(left(sink_name, 60)), 'without a name')),
        hint = (select coalesce('There are: ' || string_agg(s.name, ', ' order by s.name), 'There is none.')
                  from outbox.sink s);
end
$$;

-- Delete the rows of a sink, found by the indexes of their states, whatever the number of other sinks' rows; return how many.
-- With `most`, delete that many if there are more, else none.
create function outbox.delete_rows(sink_name text, most integer default null) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    doomed bigint[];
    gone bigint;
    deleted bigint := 0;
begin
    if most is not null then
        doomed := array(
            (select d.id from outbox.delivery d
              where d.sink = sink_name and d.state = 'dead' order by d.id limit most + 1)
            union all
            (select d.id from outbox.delivery d
              where d.sink = sink_name and d.state = 'waiting' order by d.due_at, d.id limit most + 1)
            union all
            (select d.id from outbox.delivery d
              where d.sink = sink_name and d.state = 'held' order by d.key limit most + 1)
            limit most + 1);
        if cardinality(doomed) <= most then
            return 0;
        end if;
        with gone as (
            delete from outbox.delivery d where d.sink = sink_name and d.id = any (doomed[1:most])
            returning d.id, d.uid
        ), marked as (
            -- For as long as the sink is there.
            insert into outbox.discarded (sink, id, uid, reason)
            select sink_name, g.id, g.uid, 'the removal of the sink has begun' from gone g
                on conflict do nothing
        )
        select count(*) into deleted from gone g;
        return deleted;
    end if;
    delete from outbox.delivery d where d.sink = sink_name and d.state = 'dead';
    get diagnostics gone = row_count;
    deleted := deleted + gone;
    delete from outbox.delivery d where d.sink = sink_name and d.state = 'waiting';
    get diagnostics gone = row_count;
    deleted := deleted + gone;
    delete from outbox.delivery d where d.sink = sink_name and d.state = 'held';
    get diagnostics gone = row_count;
    return deleted + gone;
end
$$;

-- As in version 2. A name that a sink had is answered by generation 0, which no sink has: a relay that registers it serves
-- its other sinks, and finds this one missing.
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
        select w.name, array(select jsonb_array_elements_text(w.patterns)) as patterns, w.start
          from jsonb_to_recordset(wanted) w (name text, patterns jsonb, start text)
    loop
        if exists (select from outbox.sink s
                    where s.name = sink.name and s.patterns <> sink.patterns
                      and s.generation = coalesce(only_from, s.generation)) then
            counter := outbox.raise_config();
            update outbox.sink s set patterns = sink.patterns, generation = counter where s.name = sink.name;
        elsif only_from is null and not exists (select from outbox.sink s where s.name = sink.name)
              and not exists (select from outbox.former_sink f where f.name = sink.name) then
            beginning := coalesce(sink.start = 'beginning', first);
            -- Rows that were written for a removed sink of this name after its removal.
            perform outbox.delete_rows(sink.name);
            delete from outbox.progress p where p.sink = sink.name;
            delete from outbox.shard s where s.sink = sink.name;
            counter := outbox.raise_config();
            select * into rebased from outbox.meta m;
            insert into outbox.sink (name, patterns, generation, start, named_at)
            values (sink.name, sink.patterns, counter, case when beginning then 'beginning' else 'now' end,
                    (select n.at from outbox.name_end n where n.name = sink.name));
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
    return query
        select s.name, s.generation, s.patterns from outbox.sink s
         where s.name in (select w.name from jsonb_to_recordset(wanted) w (name text))
        union all
        select f.name, 0::bigint, '{}'::text[] from outbox.former_sink f
         where only_from is null
           and f.name in (select w.name from jsonb_to_recordset(wanted) w (name text))
           and not exists (select from outbox.sink s where s.name = f.name);
end
$$;

-- As in version 2, by outbox.delete_rows.
create or replace function outbox.remove_sink(sink_name text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    tries constant integer := 5;
    removed_rows bigint;
begin
    lock table outbox.sink in share row exclusive mode;
    if not exists (select from outbox.sink s where s.name = sink_name) then
        raise exception using errcode = 'no_data_found',
            message = format('there is no sink %s', coalesce(quote_literal(sink_name), 'without a name')),
            hint = (select coalesce('There are: ' || string_agg(s.name, ', ' order by s.name), 'There is none.')
                      from outbox.sink s);
    end if;
    perform from outbox.shard s where s.sink = sink_name order by s.shard for update;
    delete from outbox.shard s where s.sink = sink_name;
    for attempt in 1..tries loop
        begin
            removed_rows := outbox.delete_rows(sink_name);
            exit;
        exception when deadlock_detected then
            if attempt = tries then
                raise;
            end if;
            perform pg_sleep(0.05 * attempt);  -- without locks on rows: else the other session may wake too late to get its own
        end;
    end loop;
    delete from outbox.sink s where s.name = sink_name;
    return removed_rows;
end
$$;

-- As in version 2, by outbox.delete_rows. The shards come first: that waits for settlements that have passed their fence, and
-- none passes it afterwards. They are locked in the order in which relays lock them.
create or replace function outbox.sink_deleted() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from outbox.shard s where s.sink = any (array(select r.name from removed r)) order by s.sink, s.shard for update;
    delete from outbox.shard s where s.sink = any (array(select r.name from removed r));
    perform outbox.raise_config();
    perform outbox.delete_rows(r.name) from removed r;
    delete from outbox.progress p where p.sink = any (array(select r.name from removed r));
    return null;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Lists and counts
-- ---------------------------------------------------------------------------------------------------------

-- Longest time since a live relay was seen, at most a day; null: 30 seconds.
create function outbox.alive_interval(seconds double precision) returns interval
language sql immutable
return least(greatest(coalesce(seconds, 30), 0), 86400) * interval '1 second';

-- The relays that were seen within `seconds` and have this sink in their settings, or serve it: names, and whether they
-- serve it. A relay made for an earlier version is listed only while it serves the sink.
create function outbox.relays_of(sink_name text, seconds double precision) returns table (name text, serves boolean)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select r.name, coalesce(sink_name = any (r.sinks), false)
      from outbox.relay r
     where r.seen_at > clock_timestamp() - outbox.alive_interval(seconds)
       and (sink_name = any (r.sinks)
            or r.config ? format('sinks.%s.type', sink_name)
            or exists (select from outbox.former_sink f
                        where f.renamed_to = sink_name and r.config ? format('sinks.%s.type', f.name)))
     order by r.name
$$;

-- Every sink, as an operator wants to see it.
create function outbox.list_sinks(alive_seconds double precision) returns table (
    name text, patterns text[], generation bigint, start text, since timestamptz, paused boolean, paused_reason text,
    relays jsonb
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select k.name, k.patterns, k.generation, k.start, k.created_at, k.paused, k.paused_reason,
           (select coalesce(jsonb_agg(jsonb_build_object('name', r.name, 'serves', r.serves) order by r.name), '[]')
              from outbox.relays_of(k.name, alive_seconds) r)
      from outbox.sink k
     order by k.name
$$;

-- The names that sinks had.
create function outbox.list_former_sinks() returns table (
    name text, removed_at timestamptz, role_name text, actor text, renamed_to text
)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select f.name, f.removed_at, f.role_name, f.actor, f.renamed_to from outbox.former_sink f order by f.name
$$;

-- The patterns of a sink for LIKE; null if one of them matches every type.
create function outbox.types_of(sink_name text) returns text[]
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case when not '*' = any (k.patterns) then array(
               select replace(regexp_replace(p, '([\\%_])', '\\\1', 'g'), '*', '%') from unnest(k.patterns) p) end
      from outbox.sink k where k.name = sink_name
$$;

-- The losses if a sink is removed: its rows, and its events that are not settled, counted up to `most` and for at most
-- `most_seconds`; and the live relays that have it in their settings.
create function outbox.preview_removal(
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
    most := outbox.bounded_count(most);
    lock table outbox.event in access share mode;  -- before the sinks, as outbox.rebase locks them
    if not exists (select from outbox.sink k where k.name = sink_name) then
        perform outbox.refuse_sink(sink_name);
    end if;
    select count(*), count(*) filter (where r.state <> 'dead') into deliveries, live
      from (select d.state from outbox.delivery d where d.sink = sink_name limit most + 1) r;
    select b.events, b.scheduled, b.exact into backlog
      from outbox.backlog(sink_name, outbox.types_of(sink_name), most, most_seconds) b;
    undelivered := live + backlog.events + backlog.scheduled;
    exact := backlog.exact and deliveries <= most;
    relays := array(select r.name from outbox.relays_of(sink_name, alive_seconds) r);
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Remove and rename
-- ---------------------------------------------------------------------------------------------------------

-- Remove a sink, and remember its name, so that no relay registers it again; with `forget` the name is free again. Of a
-- sink that is removed already, `forget` forgets the name.
--
-- A sink with more than `most` rows is paused, loses as many of them, and is removed by a later call: each call is
-- short. Former names of the sink do not lead anywhere any more: they count as removed.
create function outbox.drop_sink(
    sink_name text, forget boolean, most integer, actor text, reason text, audit_id bigint default null,
    out removed boolean, out forgotten boolean, out deliveries bigint, out audit bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
#variable_conflict use_variable
begin
    perform outbox.end_when_idle();
    perform outbox.require_read_committed('outbox.drop_sink');
    lock table outbox.sink in share row exclusive mode;
    forget := coalesce(forget, false);
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    deliveries := 0;
    removed := false;
    forgotten := false;
    if exists (select from outbox.sink k where k.name = sink_name) then
        deliveries := outbox.delete_rows(sink_name, most);
        if deliveries > 0 then
            perform set_config('outbox.actor', coalesce(actor, ''), true);
            update outbox.sink k set paused = true, paused_reason = 'it is being removed: run outbox-relay sinks remove again'
             where k.name = sink_name;
            perform set_config('outbox.actor', '', true);
        else
            deliveries := outbox.remove_sink(sink_name);
            removed := true;
            update outbox.former_sink f set renamed_to = null where f.renamed_to = sink_name;
            if not forget then
                insert into outbox.former_sink (name, actor) values (sink_name, actor)
                    on conflict (name) do update
                   set removed_at = clock_timestamp(), role_name = outbox.emitter(), actor = excluded.actor,
                       renamed_to = null;
            end if;
        end if;
    elsif not exists (select from outbox.former_sink f
                       where f.name = sink_name and (forget or f.renamed_to is null)) then
        perform outbox.refuse_sink(sink_name);
    end if;
    if forget and not exists (select from outbox.sink k where k.name = sink_name) then
        delete from outbox.former_sink f where f.name = sink_name;
        forgotten := found;
    end if;
    if removed or forgotten or deliveries > 0 then
        audit := outbox.record_action(case when forgotten and not removed and audit_id is null then 'sinks forget'
                                           else 'sinks remove' end,
                                      sink_name, jsonb_build_object('forget', forget), deliveries, actor, reason, audit_id);
    end if;
end
$$;

-- Raise unless a sink may have this name.
create function outbox.check_sink_name(sink_name text) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if sink_name is null or sink_name !~ '^[a-z][a-z0-9_]{0,39}$' or strpos(sink_name, '__') > 0 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%s cannot be the name of a sink: it is 1 to 40 of a-z, 0-9 and _, begins with a letter and '
                             'holds no __', coalesce(quote_literal(left(sink_name, 60)), 'null'));
    end if;
end
$$;

-- Move the rows and marks of a sink to another name, and return how many rows there were. Rows are locked in no order, so
-- that is tried again.
create function outbox.move_rows(sink_name text, new_name text) returns bigint
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
create function outbox.rename_sink(sink_name text, new_name text, actor text, reason text) returns bigint
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
    perform outbox.end_when_idle();
    perform outbox.require_read_committed('outbox.rename_sink');
    perform outbox.check_sink_name(new_name);
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
        perform outbox.delete_rows(new_name);
        delete from outbox.discarded m where m.sink = new_name;
        moved := outbox.move_rows(sink_name, new_name);
    end if;
    lock table outbox.sink in share row exclusive mode;
    if not exists (select from outbox.sink k where k.name = sink_name) then
        perform outbox.refuse_sink(sink_name);
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
    fence := outbox.raise_config() << 32;
    perform outbox.move_passes(sink_name, new_name);
    insert into outbox.sink
    select (jsonb_populate_record(k, jsonb_build_object('name', new_name, 'named_at',
                case when known.renamed_to = sink_name then known.named_at
                     else (select n.at from outbox.name_end n where n.name = new_name) end))).*
      from outbox.sink k where k.name = sink_name;
    update outbox.shard s set sink = new_name, epoch = greatest(s.epoch + 1, fence) where s.sink = sink_name;
    -- Before the last rows are moved: it waits for a session that gives dead letters of a replay to the old name.
    perform outbox.follow_rename(sink_name, new_name);
    delete from outbox.progress p where p.sink = new_name;
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select new_name, array_agg(p.shard order by p.shard), array_agg(s.epoch order by p.shard),
           p.a_seq, p.a_snapshot::text::pg_snapshot, p.a_next, p.b_seq, p.b_snapshot::text::pg_snapshot, p.b_next, p.last_id
      from outbox.standing p
      join outbox.shard s on s.sink = new_name and s.shard = p.shard
     where p.sink = sink_name
     group by p.a_seq, p.a_snapshot::text, p.a_next, p.b_seq, p.b_snapshot::text, p.b_next, p.last_id;
    moved := moved + outbox.move_rows(sink_name, new_name);
    delete from outbox.sink k where k.name = sink_name;
    delete from outbox.former_sink f where f.name = new_name;
    update outbox.former_sink f set renamed_to = new_name where f.renamed_to = sink_name;
    insert into outbox.former_sink (name, actor, renamed_to, named_at) values (sink_name, actor, new_name, named_since)
        on conflict (name) do update
       set removed_at = clock_timestamp(), role_name = outbox.emitter(), actor = excluded.actor,
           renamed_to = excluded.renamed_to, named_at = excluded.named_at;
    perform outbox.record_action('sinks rename', sink_name, jsonb_build_object('to', new_name), moved, actor, reason);
    return moved;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Seek
-- ---------------------------------------------------------------------------------------------------------

-- The lowest id of an event that was emitted at or after a time, by this database's clock; null if there is none. Ids and
-- times are nearly in one order: events of 10 minutes and 20,000 ids before the place are compared one by one, for
-- clocks that were set back and transactions that took their ids early. After `most_seconds` of that the id may be lower.
create function outbox.first_id_since(since timestamptz, most_seconds double precision) returns bigint
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

-- Number of events of a sink that are not settled, of ids in (after_id, upto_id]: rows are not counted. Counts up to
-- `most`, and until a time.
create function outbox.count_unsettled(
    sink_name text, after_id bigint, upto_id bigint, most integer, until timestamptz, out events bigint, out exact boolean
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    everything constant pg_snapshot := '9223372036854775807:9223372036854775807:';
    no_limit constant bigint := 9223372036854775807;
    span constant bigint := 500000;
    types constant text[] := outbox.types_of(sink_name);
    piece record;
    low bigint;
    high bigint;
    chunk bigint;
begin
    events := 0;
    exact := true;
    for piece in
        select u.late, u.shards, u.a, u.a_next, greatest(u.after_id, after_id) as low, least(u.upto_id, upto_id) as high
          from outbox.unsettled(sink_name) u
    loop
        low := piece.low;
        while low < piece.high loop
            high := case when piece.late then piece.high else least(piece.high, low + span) end;
            if piece.late then
                select count(*) into chunk
                  from outbox.read_late(piece.shards, types, piece.a, piece.a_next, everything, low, high, most + 1,
                                        no_limit) l
                 where not exists (select from outbox.delivery d where d.sink = sink_name and d.id = l.id);
            else
                select count(*) into chunk
                  from outbox.read_rest(piece.shards, types, piece.a, everything, low, high, most + 1, no_limit) l
                 where not exists (select from outbox.delivery d where d.sink = sink_name and d.id = l.id);
            end if;
            events := events + chunk;
            low := high;
            if events > most or clock_timestamp() > until then
                exact := exact and events <= most and low >= piece.high;
                exit;
            end if;
        end loop;
    end loop;
end
$$;

-- The effect of a seek of a sink to the place before `from_id` (null: the end of the log): how many events are
-- delivered again, how many are passed over, and of those that come again, how many are dead or were discarded. Counts
-- up to `most` and for some seconds.
create function outbox.count_seek(
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
    half constant interval := most_seconds / 2 * interval '1 second';
    types constant text[] := outbox.types_of(sink_name);
    until timestamptz := clock_timestamp() + half;
    low bigint := place;
    high bigint;
    counted record;
begin
    select c.events, c.exact into passed_over, exact
      from outbox.count_unsettled(sink_name, 0, place, most, until) c;
    until := clock_timestamp() + half;
    again := 0;
    while low < newest loop
        high := least(low + span, newest);
        again := again + (
            select count(*) from outbox.read_rest(array(select generate_series(0, 63))::smallint[], types, '3:3:', everything,
                                                  low, high, most + 1, no_limit));
        low := high;
        exit when again > most or clock_timestamp() > until;
    end loop;
    exact := exact and again <= most and low >= newest;
    if again > 0 then
        select c.events, c.exact into counted
          from outbox.count_unsettled(sink_name, place, low, most, clock_timestamp() + half) c;
        again := greatest(again - counted.events, 0);
        exact := exact and counted.exact;
    end if;
    select count(*) into dead
      from (select from outbox.delivery d where d.sink = sink_name and d.state = 'dead' and d.id > place limit most) r;
    select count(*) into discarded
      from (select from outbox.discarded m where m.sink = sink_name and m.id > place limit most) r;
end
$$;

-- The place before which a seek puts a sink: 1 for the beginning, null for the end of the log.
create function outbox.seek_place(target text) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    if target = 'now' then
        return null;
    elsif target = 'beginning' then
        return 1;
    end if;
    return outbox.first_id_since(outbox.past_time('to', to_jsonb(target), clock_timestamp()), 5);
end
$$;

-- The effect of a seek to `target` ('now', 'beginning' or a time), without the seek.
create function outbox.preview_seek(
    sink_name text, target text, most integer, most_seconds double precision,
    out again bigint, out passed_over bigint, out dead bigint, out discarded bigint, out exact boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    lock table outbox.event in access share mode;  -- before the sinks, as outbox.rebase locks them
    if not exists (select from outbox.sink k where k.name = sink_name) then
        perform outbox.refuse_sink(sink_name);
    end if;
    select c.* into again, passed_over, dead, discarded, exact
      from outbox.count_seek(sink_name, outbox.seek_place(target), outbox.bounded_count(most),
                             outbox.bounded_seconds(most_seconds)) c;
end
$$;

-- A tick for an action, in a transaction of its own: see outbox.tick.
create function outbox.action_tick(
    out seq bigint, out snapshot pg_snapshot, out next_xid bigint, out incarnation text, out generations bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform outbox.require_read_committed('outbox.action_tick');
    select t.seq, t.snapshot, t.next_xid, t.incarnation, t.generations
      into seq, snapshot, next_xid, incarnation, generations
      from outbox.tick() t;
end
$$;

-- Raise unless a tick is one of this server that was taken since the last change of the configuration, and that is all
-- that a position may be made of. To be called with the table of sinks locked.
create function outbox.check_action_tick(
    seq bigint, snapshot pg_snapshot, next_xid bigint, incarnation text, generations bigint
) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    here record;
    next_here bigint;
begin
    select m.config, m.floor, coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0) as newest,
           pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xmax
      into here from outbox.meta m;
    -- As in outbox.tick: the next number, or the own one, which is above every earlier tick's.
    next_here := here.xmax + (((3 + age('3'::xid)::bigint) - here.xmax) & 4294967295);
    if incarnation is distinct from outbox.incarnation() or generations is distinct from here.config then
        raise exception using errcode = 'serialization_failure',
            message = 'the configuration changed, or the server restarted, since the tick was taken: try again';
    end if;
    if (seq between here.floor and here.newest and next_xid >= pg_snapshot_xmax(snapshot)::text::bigint
        and pg_snapshot_xmax(snapshot)::text::bigint between 3 and here.xmax and next_xid <= next_here) is not true then
        raise exception using errcode = 'invalid_parameter_value', message = 'the tick does not belong to this log';
    end if;
end
$$;

-- Put a sink at another place of the log: 'now', 'beginning', or before the first event that was emitted at or after a
-- time. The tick, of outbox.action_tick, was taken before the place is looked up: an event with a lower id that is
-- committed between the two is late for the tick, and delivered.
--
-- The fence: epochs above all that were given out, so nothing counts that is still written of the old place; and a new
-- generation, so a relay claims no shard before it has begun again from the stored positions. Owners and leases stay:
-- no other relay delivers a shard while its owner may still be sending. Rows of `delivery` stay, too.
create function outbox.seek_sink(
    sink_name text, target text, tick_seq bigint, tick_snapshot pg_snapshot, tick_next bigint, tick_incarnation text,
    tick_generations bigint, actor text, reason text,
    out again bigint, out passed_over bigint, out exact boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '3s'
as $$
declare
    everything constant pg_snapshot := '9223372036854775807:9223372036854775807:';
    from_id bigint;
    place bigint;
    rebased outbox.meta;
    counter bigint;
begin
    perform outbox.end_when_idle();
    perform outbox.require_read_committed('outbox.seek_sink');
    lock table outbox.event in access share mode;  -- before the sinks, as outbox.rebase locks them
    if not exists (select from outbox.sink k where k.name = sink_name) then
        perform outbox.refuse_sink(sink_name);
    end if;
    from_id := outbox.seek_place(target);
    select c.again, c.passed_over, c.exact into again, passed_over, exact
      from outbox.count_seek(sink_name, from_id, 10000, 2) c;
    lock table outbox.sink in share row exclusive mode;
    if not exists (select from outbox.sink k where k.name = sink_name) then
        perform outbox.refuse_sink(sink_name);
    end if;
    perform outbox.check_action_tick(tick_seq, tick_snapshot, tick_next, tick_incarnation, tick_generations);
    perform from outbox.shard s where s.sink = sink_name order by s.shard for update;
    counter := outbox.raise_config();
    select * into rebased from outbox.meta;
    -- Epochs before the generation, so that no owner counts as one that has claimed under the new one.
    update outbox.shard s set epoch = greatest(s.epoch + 1, counter << 32) where s.sink = sink_name;
    insert into outbox.shard (sink, shard, epoch)
    select sink_name, n, counter << 32 from generate_series(0, 63) n on conflict do nothing;
    perform outbox.end_passes(sink_name);
    update outbox.sink k set generation = counter where k.name = sink_name;
    -- Relays of version 2 do not know marks of discarded events, and would deliver these again.
    update outbox.meta m set min_relay = 3
     where m.min_relay < 3 and exists (select from outbox.discarded o where o.sink = sink_name);
    place := case when from_id - 1 < tick_seq or target = 'beginning' then from_id - 1 end;
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select sink_name, s.shards, s.epochs, p.a_seq, p.a_snapshot, p.a_next, p.b_seq, p.b_snapshot, p.b_next, 0
      from (select array_agg(h.shard order by h.shard) as shards, array_agg(h.epoch order by h.shard) as epochs
              from outbox.shard h where h.sink = sink_name) s
     cross join (
        select tick_seq, tick_snapshot, tick_next, null::bigint, null::pg_snapshot, null::bigint where place is null
        union all
        select place, '3:3:', 3, rebased.floor, everything, rebased.floor_xid where place < rebased.floor
        union all
        select place, '3:3:', 3, tick_seq, tick_snapshot, tick_next where place >= rebased.floor
     ) p (a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next);
    perform outbox.begin_passes(sink_name, 'seek');
    perform outbox.record_action('sinks seek', sink_name, jsonb_build_object('to', target), again + passed_over, actor,
                                 reason);
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Configuration
-- ---------------------------------------------------------------------------------------------------------

-- The settings of the relays that were seen within `seconds`; null of a relay made for an earlier version.
create function outbox.relay_configs(seconds double precision) returns table (name text, version text, config jsonb)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select r.name, r.version, r.config
      from outbox.relay r
     where r.seen_at > clock_timestamp() - outbox.alive_interval(seconds)
     order by r.name, r.id
$$;
