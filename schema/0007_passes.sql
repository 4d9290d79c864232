-- The parts of the log that each sink has read, and its patterns: so that `why` tells what became of an event. Relays
-- made for version 2 work on this schema, and their passes are recorded too.

-- ---------------------------------------------------------------------------------------------------------
-- Patterns and passes
-- ---------------------------------------------------------------------------------------------------------

-- The patterns of each generation of a sink, for as long as a pass refers to it.
create table outbox.sink_patterns (
    sink text collate "C" not null,
    generation bigint not null,
    patterns text[] not null,
    primary key (sink, generation)
);

insert into outbox.sink_patterns (sink, generation, patterns)
select k.name, k.generation, k.patterns from outbox.sink k;

create function outbox.keep_patterns() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    insert into outbox.sink_patterns (sink, generation, patterns)
    values (new.name, new.generation, new.patterns)
        on conflict do nothing;
    return null;
end
$$;

create trigger keep_patterns after insert or update of patterns, generation on outbox.sink
for each row execute function outbox.keep_patterns();

-- A pass of a shard: from a position on, its owners read the log under the patterns of one generation. It goes up to where
-- it was ended, else to where the next pass of the shard begins, else to the shard's position. `epoch` is that of the
-- shard at its beginning; `begun_seq` and `end_seq` name the rows of the ledger from which the two positions come. A
-- `known` pass is empty: it has the position of a shard before its sink was put at another place.
create table outbox.sink_pass (
    sink text collate "C" not null,
    shard smallint not null,
    seq bigint generated always as identity,
    generation bigint not null,
    epoch bigint not null,
    kind text not null check (kind in ('start', 'claim', 'seek', 'known')),
    begun_at timestamptz not null default clock_timestamp(),
    begun_seq bigint not null,
    a_seq bigint not null,
    a_snapshot pg_snapshot not null,
    a_next bigint not null,
    b_seq bigint,
    b_snapshot pg_snapshot,
    b_next bigint,
    last_id bigint not null,
    ended_at timestamptz,
    end_seq bigint,
    end_a_seq bigint,
    end_a_snapshot pg_snapshot,
    end_a_next bigint,
    end_b_seq bigint,
    end_b_snapshot pg_snapshot,
    end_last_id bigint,
    more_rows boolean not null default false,
    primary key (sink, shard, seq)
);
comment on column outbox.sink_pass.more_rows is
    'Not every row after the end was examined for outbox.row_ahead: the sink may have delivered more events there.';

-- Positions that owners wrote after their pass had ended, as after a seek that they had not noticed. They do not count for
-- those who read on, but what they say is true: up to there the events were delivered. Filled when the ledger is trimmed.
-- One owner writes at an epoch, and its last position has passed everything that its earlier ones have.
create table outbox.late_position (
    sink text collate "C" not null,
    shard smallint not null,
    epoch bigint not null,
    seq bigint not null,
    a_seq bigint not null,
    a_snapshot pg_snapshot not null,
    a_next bigint not null,
    b_seq bigint,
    b_snapshot pg_snapshot,
    last_id bigint not null,
    primary key (sink, shard, epoch)
);

-- Events after the end of a pass that had a row of `delivery` then: they were routed to the sink, though no pass covers
-- them.
create table outbox.row_ahead (
    sink text collate "C" not null,
    id bigint not null,
    primary key (sink, id)
);

-- Another sink of a removed sink's name has passed nothing.
create function outbox.passes_deleted() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from outbox.sink_pass p where p.sink = any (array(select r.name from removed r));
    delete from outbox.sink_patterns p where p.sink = any (array(select r.name from removed r));
    delete from outbox.late_position p where p.sink = any (array(select r.name from removed r));
    delete from outbox.row_ahead p where p.sink = any (array(select r.name from removed r));
    insert into outbox.name_end (name) select r.name from removed r
        on conflict (name) do update set at = excluded.at;
    return null;
end
$$;

create trigger passes_deleted after delete on outbox.sink
referencing old table as removed
for each statement execute function outbox.passes_deleted();

-- ---------------------------------------------------------------------------------------------------------
-- Claims
-- ---------------------------------------------------------------------------------------------------------

alter table outbox.shard add column generation bigint;
comment on column outbox.shard.generation is
    'The generation under which the owner claimed the shard; null if that is not known.';

-- Write down the generation of a claim. STABLE, so that it is read with the snapshot of the claim's own statement, with which
-- that compares generations: a generation that is registered meanwhile is not the claim's.
--
-- A relay that serves an older generation may give its shards new epochs. It checks the generation before it reads again,
-- and then reads nothing: the generation in force is right for those too.
create function outbox.mark_generation() returns trigger
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    new.generation := (select k.generation from outbox.sink k where k.name = new.sink);
    return new;
end
$$;

-- A claim begins a lease. A seek and a rename raise epochs, too, and leave the lease alone. A shard of a replay (`~ID`) has
-- no passes.
create trigger mark_generation before update on outbox.shard
for each row when (new.owner is not null and new.epoch <> old.epoch and new.lease_until <> old.lease_until and new.sink < '~')
execute function outbox.mark_generation();

-- Remember the events after the end of the passes of these shards that have a row. Return false if there are more rows with
-- higher ids, of any sink, than it looks at. A late event with a lower id is not found.
create function outbox.keep_rows_ahead(sink_name text, of_shards smallint[]) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    most constant integer := 20000;
    lowest constant bigint := (select min(coalesce(nullif(n.last_id, 0), n.a_seq)) from outbox.standing n
                                where n.sink = sink_name and n.shard = any (of_shards));
    looked_at bigint;
begin
    with ahead as materialized (
        select d.id, d.sink, d.shard, d.created_at from outbox.delivery d where d.id > lowest order by d.id limit most
    ),
    kept as (
        insert into outbox.row_ahead (sink, id)
        select w.sink, w.id
          from ahead w
         -- One look-up for each row, in the partition of its day: a claim waits for this. No join may read the whole log.
         cross join lateral (
            select o.id, o.xid from outbox.event o
             where o.id = w.id and o.created_at = w.created_at and o.shard = w.shard
             limit 1) e
          join outbox.standing n on n.sink = w.sink and n.shard = w.shard
         where w.sink = sink_name and w.shard = any (of_shards)
           and not outbox.position_passed(e.id, e.xid, n.a_seq, n.a_snapshot, n.a_next, n.b_snapshot, n.last_id,
                                          (select m.floor from outbox.meta m))
            on conflict do nothing
    )
    select count(*) into looked_at from ahead;
    return looked_at < most;
end
$$;

-- Begin passes of the shards that were claimed under another generation than their newest pass has. The first of them does it
-- for all shards of the claim, and finds once where they stand.
--
-- The position is also written into the ledger, at the epoch of the claim. From then on it outranks everything that an
-- earlier owner still writes, so the new owner begins exactly where the pass does. For this the function is VOLATILE: what
-- was settled before the claim had the row is seen. Shards without a position are left out: no relay serves them.
create function outbox.begin_claimed() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    claimed smallint[];
begin
    if exists (select from (select p.generation, p.ended_at from outbox.sink_pass p
                             where p.sink = new.sink and p.shard = new.shard order by p.seq desc limit 1) n
                where n.generation = new.generation and n.ended_at is null) then
        return null;
    end if;
    claimed := array(
        select s.shard
          from outbox.shard s
         where s.sink = new.sink and s.owner = new.owner and s.generation = new.generation
           and (s.xmin = pg_current_xact_id()::xid or s.shard = new.shard)
           and not exists (select from (select p.generation, p.ended_at from outbox.sink_pass p
                                         where p.sink = s.sink and p.shard = s.shard order by p.seq desc limit 1) n
                            where n.generation = new.generation and n.ended_at is null)
    );
    if not outbox.keep_rows_ahead(new.sink, claimed) then
        update outbox.sink_pass p
           set more_rows = true
         where p.sink = new.sink and p.shard = any (claimed) and p.ended_at is null
           and p.seq = (select max(o.seq) from outbox.sink_pass o where o.sink = p.sink and o.shard = p.shard);
    end if;
    with begun as (
        insert into outbox.sink_pass (sink, shard, generation, epoch, kind, begun_seq, a_seq, a_snapshot, a_next, b_seq,
                                      b_snapshot, b_next, last_id)
        select n.sink, n.shard, new.generation, s.epoch, 'claim', n.seq, n.a_seq, n.a_snapshot, n.a_next, n.b_seq,
               n.b_snapshot, n.b_next, n.last_id
          from outbox.standing n
          join outbox.shard s on s.sink = n.sink and s.shard = n.shard
         where n.sink = new.sink and n.shard = any (claimed)
        returning *
    )
    insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
    select new.sink, array_agg(b.shard order by b.shard), array_agg(b.epoch order by b.shard), b.a_seq,
           b.a_snapshot::text::pg_snapshot, b.a_next, b.b_seq, b.b_snapshot::text::pg_snapshot, b.b_next, b.last_id
      from begun b
     group by b.a_seq, b.a_snapshot::text, b.a_next, b.b_seq, b.b_snapshot::text, b.b_next, b.last_id;
    return null;
end
$$;

create trigger begin_claimed after update on outbox.shard
for each row when (new.owner is not null and new.epoch <> old.epoch and new.lease_until <> old.lease_until and new.sink < '~')
execute function outbox.begin_claimed();

-- Keep positions that were written at the epochs of a pass after it had ended. Called for each trim of the ledger, so that
-- nearly all rows must be found to be of the newest pass at little cost: by one array of epochs for each sink.
create function outbox.keep_late() returns trigger
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    with newest as materialized (
        select k.sink, array(
                   select coalesce((select p.epoch from outbox.sink_pass p
                                     where p.sink = k.sink and p.shard = n order by p.seq desc limit 1), 0)
                     from generate_series(0, 63) n order by n) as epochs
          from (select distinct g.sink from gone g) k
    ),
    outranked as materialized (
        select distinct on (g.sink, u.shard, u.epoch)
               g.sink, u.shard, u.epoch, g.seq, g.a_seq, g.a_snapshot, g.a_next, g.b_seq, g.b_snapshot, g.last_id
          from gone g
          join newest n on n.sink = g.sink
         cross join lateral unnest(g.shards, g.epochs) u (shard, epoch)
         where u.epoch < n.epochs[u.shard + 1]
         order by g.sink, u.shard, u.epoch, g.seq desc
    )
    insert into outbox.late_position as l (sink, shard, epoch, seq, a_seq, a_snapshot, a_next, b_seq, b_snapshot, last_id)
    select o.*
      from outranked o
     where exists (
        select from outbox.pass_spans(o.sink, o.shard) p
         where o.epoch >= p.epoch and o.epoch < p.next_epoch and o.seq > p.final_seq)
        on conflict (sink, shard, epoch) do update
       set seq = excluded.seq, a_seq = excluded.a_seq, a_snapshot = excluded.a_snapshot, a_next = excluded.a_next,
           b_seq = excluded.b_seq, b_snapshot = excluded.b_snapshot, last_id = excluded.last_id
     where l.seq < excluded.seq;
    return null;
end
$$;

create trigger keep_late after delete on outbox.progress
    referencing old table as gone for each statement execute function outbox.keep_late();

-- The passes of a shard that have ended: the epochs of their owners (up to `next_epoch`), and the row of the ledger that was the
-- last one to count.
create function outbox.pass_spans(sink_name text, of_shard smallint) returns table (
    seq bigint, epoch bigint, next_epoch bigint, final_seq bigint
)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select p.seq, p.epoch, p.next_epoch, coalesce(p.end_seq, p.next_begun_seq)
      from (
        select o.seq, o.epoch, o.kind, o.end_seq, lead(o.epoch) over w as next_epoch, lead(o.begun_seq) over w as next_begun_seq
          from outbox.sink_pass o
         where o.sink = sink_name and o.shard = of_shard
        window w as (order by o.seq)
      ) p
     where p.next_epoch is not null and p.kind <> 'known'
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Registrations, seeks and renames
-- ---------------------------------------------------------------------------------------------------------

-- Begin passes of a sink where its shards stand, under its generation, whatever passes there are.
create function outbox.begin_passes(sink_name text, pass_kind text) returns void
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    insert into outbox.sink_pass (sink, shard, generation, epoch, kind, begun_seq, a_seq, a_snapshot, a_next, b_seq, b_snapshot,
                                  b_next, last_id)
    select n.sink, n.shard, k.generation, n.epoch, pass_kind, n.seq, n.a_seq, n.a_snapshot, n.a_next, n.b_seq, n.b_snapshot,
           n.b_next, n.last_id
      from outbox.standing n
      join outbox.sink k on k.name = n.sink
     where n.sink = sink_name
     order by n.shard
$$;

-- End the passes of a sink where its shards stand. A shard without a pass gets one that says only that. To be called with
-- the shards locked and their epochs raised, before new positions are written.
create function outbox.end_passes(sink_name text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    complete constant boolean := outbox.keep_rows_ahead(sink_name, array(select generate_series(0, 63))::smallint[]);
begin
    insert into outbox.sink_pass (sink, shard, generation, epoch, kind, begun_seq, a_seq, a_snapshot, a_next, b_seq, b_snapshot,
                                  b_next, last_id)
    select n.sink, n.shard, k.generation, n.epoch, 'known', n.seq, n.a_seq, n.a_snapshot, n.a_next, n.b_seq, n.b_snapshot,
           n.b_next, n.last_id
      from outbox.standing n
      join outbox.sink k on k.name = n.sink
     where n.sink = sink_name
       and not exists (select from outbox.sink_pass p where p.sink = n.sink and p.shard = n.shard);
    update outbox.sink_pass p
       set ended_at = clock_timestamp(), end_seq = n.seq, more_rows = not complete,
           end_a_seq = n.a_seq, end_a_snapshot = n.a_snapshot, end_a_next = n.a_next,
           end_b_seq = n.b_seq, end_b_snapshot = n.b_snapshot, end_last_id = n.last_id
      from outbox.standing n
     where n.sink = sink_name and p.sink = n.sink and p.shard = n.shard and p.ended_at is null
       and p.seq = (select max(o.seq) from outbox.sink_pass o where o.sink = n.sink and o.shard = n.shard);
end
$$;

-- Move the passes of a sink to another name, before its shards are moved.
create function outbox.move_passes(sink_name text, new_name text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    delete from outbox.sink_pass p where p.sink = new_name;
    delete from outbox.sink_patterns p where p.sink = new_name;
    delete from outbox.late_position p where p.sink = new_name;
    delete from outbox.row_ahead p where p.sink = new_name;
    update outbox.sink_pass p set sink = new_name where p.sink = sink_name;
    update outbox.sink_patterns p set sink = new_name where p.sink = sink_name;
    update outbox.late_position p set sink = new_name where p.sink = sink_name;
    update outbox.row_ahead p set sink = new_name where p.sink = sink_name;
end
$$;

-- ---------------------------------------------------------------------------------------------------------
-- States
-- ---------------------------------------------------------------------------------------------------------

-- True if one of the patterns matches an event type: "*" is any number of characters.
create function outbox.type_matches(patterns text[], event_type text) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
    select coalesce(bool_or(event_type collate "C"
                            like replace(regexp_replace(p collate "C", '([\\%_])', '\\\1', 'g'), '*', '%')), false)
      from unnest(patterns) p
$$;

-- Tells if a shard has passed an event, and how. `passed`: by its position. `covered`: a pass has read over it, or an
-- owner has settled it after its pass had ended; `routed`: under patterns that match its type. `reading`: so do those
-- of the open pass. `over_by` and `over_at`: the registration ('start') or seek that last put the shard behind
-- it, when nothing had read it. `doubtful`: a pass that matches ended before it, with more rows than are known.
-- `forgotten`: a rebase came since, and the sink was there before.
create function outbox.passage(
    sink_name text, event_shard smallint, event_id bigint, event_xid xid8, event_type text,
    out passed boolean, out covered boolean, out routed boolean, out reading boolean, out doubtful boolean,
    out over_by text, out over_at timestamptz, out forgotten boolean
)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with ledger as materialized (
        select p.seq, p.epochs[array_position(p.shards, event_shard)] as epoch,
               outbox.position_passed(event_id, event_xid, p.a_seq, p.a_snapshot, p.a_next, p.b_snapshot, p.last_id,
                                      m.floor) as passed
          from outbox.progress p
         cross join outbox.meta m
         where p.sink = sink_name and event_shard = any (p.shards)
    ),
    place as materialized (
        select coalesce((select l.passed from ledger l order by l.epoch desc, l.seq desc limit 1), false) as passed
    ),
    late as materialized (
        select v.seq
          from outbox.pass_spans(sink_name, event_shard) v
         where exists (select from ledger l
                        where l.passed and l.epoch >= v.epoch and l.epoch < v.next_epoch and l.seq > v.final_seq)
            or exists (select from outbox.late_position l
                        where l.sink = sink_name and l.shard = event_shard and l.epoch >= v.epoch and l.epoch < v.next_epoch
                          and outbox.position_passed(event_id, event_xid, l.a_seq, l.a_snapshot, l.a_next, l.b_snapshot,
                                                     l.last_id, (select m.floor from outbox.meta m)))
    ),
    bounds as (
        select p.seq, p.kind, p.generation, p.begun_at, p.ended_at, p.more_rows,
               outbox.position_passed(event_id, event_xid, p.a_seq, p.a_snapshot, p.a_next, p.b_snapshot, p.last_id,
                                      m.floor) as at_begin,
               case when p.ended_at is not null
                    then outbox.position_passed(event_id, event_xid, p.end_a_seq, p.end_a_snapshot, p.end_a_next,
                                                p.end_b_snapshot, p.end_last_id, m.floor) end as at_end
          from outbox.sink_pass p
         cross join outbox.meta m
         where p.sink = sink_name and p.shard = event_shard
    ),
    passes as (
        select b.seq, b.kind, b.generation, b.begun_at, b.ended_at, b.more_rows, b.at_begin,
               coalesce(b.at_end, lead(b.at_begin) over (order by b.seq), (select l.passed from place l)) as at_end
          from bounds b
    ),
    judged as (
        select p.seq, p.kind, p.begun_at, p.ended_at, p.more_rows and not p.at_end as doubtful,
               p.at_begin and p.kind in ('start', 'seek')
                   and not coalesce(lag(p.at_end) over (order by p.seq), p.kind <> 'start') as passed_over,
               t.patterns is not null
                   and not p.at_begin and (p.at_end or p.seq in (select v.seq from late v)) as covered,
               outbox.type_matches(t.patterns, event_type) as wanted
          from passes p
          left join outbox.sink_patterns t on t.sink = sink_name and t.generation = p.generation
    )
    select (select l.passed from place l),
           coalesce(bool_or(j.covered), false),
           coalesce(bool_or(j.covered and j.wanted), false)
               or exists (select from outbox.row_ahead w where w.sink = sink_name and w.id = event_id),
           coalesce((array_agg(j.wanted and j.ended_at is null order by j.seq desc))[1], false),
           coalesce(bool_or(j.doubtful and j.wanted), false),
           (array_agg(j.kind order by j.seq desc) filter (where j.passed_over))[1],
           (array_agg(j.begun_at order by j.seq desc) filter (where j.passed_over))[1],
           event_id <= (select m.floor from outbox.meta m) and not coalesce(bool_or(j.kind = 'start'), false)
      from judged j
$$;

-- Seconds for people: at least 0, with milliseconds.
create function outbox.in_seconds(duration interval) returns double precision
language sql immutable
return case when duration is not null then round(greatest(extract(epoch from duration), 0), 3)::double precision end;

-- The newest recorded delivery of an event by each sink. An attempt counts for the sink that had its name then, under
-- whatever name it is now known: a name that another sink had before lends nothing. `wanted_id` and
-- `since` are the id of the event in the log, where a rebase may have given it another one, and when it was emitted: an
-- earlier event may have had its uid.
create function outbox.recorded_deliveries(wanted uuid, wanted_id bigint, since timestamptz) returns table (sink text, details jsonb)
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select distinct on (k.name)
           k.name,
           jsonb_strip_nulls(jsonb_build_object(
               'at', a.at, 'attempt', a.number, 'relay', a.relay, 'status', a.status, 'milliseconds', a.milliseconds,
               'topic', a.detail -> 'topic', 'partition', a.detail -> 'partition', 'offset', a.detail -> 'offset'))
      from outbox.attempt a
      left join outbox.former_sink f on f.name = a.sink and not exists (select from outbox.sink o where o.name = a.sink)
      join outbox.sink k on k.name = coalesce(f.renamed_to, a.sink)
     where a.uid = wanted and a.outcome = 'delivered'
       and (wanted_id is null or a.id = wanted_id
            or (wanted_id <= (select m.floor from outbox.meta m) and a.at >= since))
       and a.at > coalesce(case when f.name is null then k.named_at else f.named_at end, '-infinity')
     order by k.name, a.at desc, a.number desc
$$;

-- The state of an event in each sink, in the words of `why --json`, with what else is known of it. Of an event that is no
-- longer in the log its rows, marks and recorded attempts are known. No payload and no header is returned.
--
-- The first that holds: erased · its row · discarded · not passed yet, by patterns that match (scheduled, pending) ·
-- delivered, as recorded · settled by a pass whose patterns match · not routed by any pass · passed over · unknown.
create function outbox.event_states(wanted uuid) returns table (sink text, state text, details jsonb)
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    with logged as materialized (
        select e.id, e.shard, e.xid, e.type, e.key, e.deliver_at, e.created_at,
               e.content_type = 'application/x-erased' and coalesce(octet_length(e.payload), 0) = 0 as erased
          from outbox.event e
         where e.uid = wanted
         order by e.id + 0 desc
         limit 1
    ),
    parked as materialized (
        select distinct on (d.sink)
               d.sink, d.id, d.key, d.state, d.ordered, d.deliver_at, d.due_at, d.attempts, d.lease_until, d.owner, d.last_error,
               d.last_status, d.last_attempt_at, outbox.last_attempt_of(d.sink, d.id) as last_attempt, d.since
          from outbox.delivery d
         where d.uid = wanted and (not exists (select from logged) or d.created_at = (select l.created_at from logged l))
         order by d.sink, d.id desc
    ),
    marked as materialized (
        select distinct on (m.sink) m.sink, m.at, m.actor, m.role_name, m.reason
          from outbox.discarded m
         where m.uid = wanted
           and (not exists (select from logged) or m.id = (select l.id from logged l)
                or (select l.id from logged l) <= (select f.floor from outbox.meta f))
         order by m.sink, m.at desc
    ),
    recorded as materialized (
        select r.sink, r.details
          from outbox.recorded_deliveries(wanted, (select l.id from logged l), (select l.created_at from logged l)) r
    ),
    -- After a restore, until the log is rebased, positions say nothing about new events.
    home as materialized (
        select m.system_identifier is distinct from (select c.system_identifier from pg_control_system() c)
                   or exists (select from outbox.progress p
                               where greatest(p.a_seq, p.last_id) > coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0))
                   as restored
          from outbox.meta m
    ),
    known as (
        select k.name, l.id, l.type, l.erased, coalesce(l.deliver_at > now(), false) as later,
               l.deliver_at, l.key, l.shard, p.passed, p.covered, p.routed, p.over_by, p.over_at,
               p.doubtful, p.forgotten,
               coalesce(p.reading and o.name is not null, false) as reading, o.name as owner, o.lease_seconds,
               outbox.type_matches(k.patterns, l.type) as wanted, k.paused, k.circuit, k.last_error
          from outbox.sink k
          left join logged l on true
          left join lateral outbox.passage(k.name, l.shard, l.id, l.xid, l.type) p on l.id is not null
          left join lateral (
            select coalesce(n.name, h.owner::text) as name, outbox.in_seconds(h.lease_until - now()) as lease_seconds
              from outbox.shard h left join outbox.relay n on n.id = h.owner
             where h.sink = k.name and h.shard = l.shard and h.owner is not null and h.lease_until > now()
          ) o on true
    ),
    judged as (
        select k.*,
               case when k.erased then 'erased'
                    when d.id is not null and d.lease_until > now() then 'waiting'
                    when d.id is not null then outbox.delivery_state(d.state, d.ordered, d.deliver_at)
                    when m.sink is not null then 'discarded'
                    when (select h.restored from home h) then 'unknown'
                    when (k.wanted or k.reading) and not k.passed then case when k.later then 'scheduled' else 'pending' end
                    when r.sink is not null then 'delivered'
                    when k.routed then 'settled'
                    when k.doubtful or k.forgotten then 'unknown'
                    when k.covered or not k.passed then 'not routed'
                    when k.over_by is not null then 'passed over'
                    else 'unknown' end as state
          from known k
          left join parked d on d.sink = k.name
          left join marked m on m.sink = k.name
          left join recorded r on r.sink = k.name
    ),
    -- The thing that an undelivered event waits for.
    stopped as (
        select j.name,
               jsonb_build_object('behind', b.uid, 'behind_state', b.state) as behind,
               jsonb_build_object('paused', j.paused, 'circuit', j.circuit, 'sink_error', j.last_error) as sink
          from judged j
          left join parked d on d.sink = j.name
          left join lateral (
            select f.uid, f.state
              from outbox.delivery f
             where f.sink = j.name and f.key = coalesce(d.key, j.key) and f.id < coalesce(d.id, j.id) and f.ordered
             order by f.state = 'dead', f.id
             limit 1
          ) b on true
         where j.state in ('pending', 'scheduled', 'waiting', 'held')
    )
    select j.name, j.state,
           case
           when j.state = 'erased' then '{}'
           when d.id is not null then
               case when d.lease_until > now()
                    then jsonb_build_object('relay', coalesce(w.name, d.owner::text),
                                            'lease_seconds', outbox.in_seconds(d.lease_until - now()))
                    else '{}' end
               || case when j.state in ('waiting', 'scheduled')
                       then jsonb_build_object('due_in_seconds', outbox.in_seconds(outbox.loadable_time(d.due_at) - now())) else '{}' end
               || case when j.state in ('waiting', 'held') then s.behind else '{}' end
               || jsonb_build_object(
                      'attempts', d.attempts, 'last_error', d.last_error, 'last_status', d.last_status,
                      'last_attempt', d.last_attempt
                          || jsonb_build_object('seconds_ago', outbox.in_seconds(now() - outbox.loadable_time(d.last_attempt_at))))
               || case when j.state = 'dead'
                       then jsonb_build_object('since_seconds',
                                               outbox.in_seconds(now() - outbox.loadable_time(coalesce(d.last_attempt_at, d.since))))
                       else coalesce(s.sink, '{}') end
           when j.state = 'discarded' then
               jsonb_build_object('at', m.at, 'by', m.actor, 'role', m.role_name, 'reason', m.reason)
           when j.state in ('pending', 'scheduled') then
               case when j.state = 'scheduled'
                    then jsonb_build_object('due_in_seconds', outbox.in_seconds(outbox.loadable_time(j.deliver_at) - now())) else '{}' end
               || jsonb_build_object('owner', j.owner, 'lease_seconds', j.lease_seconds)
               || s.behind || s.sink || jsonb_build_object('again', coalesce(j.routed or r.sink is not null, false))
           when j.state = 'delivered' then r.details
           when j.state = 'passed over' then jsonb_build_object('by', j.over_by, 'at', j.over_at)
           when j.state = 'unknown' then
               jsonb_build_object('reason', case when (select h.restored from home h) then 'rebase needed'
                                                 when j.id is null then 'past retention'
                                                 when j.doubtful then 'too many rows'
                                                 when j.forgotten then 'before a rebase'
                                                 else 'before passes were recorded' end)
           else '{}' end
      from judged j
      left join parked d on d.sink = j.name
      left join marked m on m.sink = j.name
      left join recorded r on r.sink = j.name
      left join stopped s on s.name = j.name
      left join outbox.relay w on w.id = d.owner
     order by j.name
$$;

-- ---------------------------------------------------------------------------------------------------------
-- Trimming
-- ---------------------------------------------------------------------------------------------------------

-- Remove passes that no event of the log can need, of each shard up to 10 of the oldest, and return how many. Those go whose
-- end, and the beginning of the next one, have passed no event that is kept: all have higher ids and transactions. Ids of
-- an older numbering cannot be compared, so nothing goes while there are any. Patterns follow when no pass refers to them.
create function outbox.trim_passes() returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    most constant integer := 10;
    removed bigint;
begin
    with kept as materialized (
        select coalesce((select min(e.id) from outbox.event e), 9223372036854775807) as lowest,
               coalesce((select e.xid from outbox.event e order by e.xid limit 1), '9223372036854775807') as oldest,
               m.floor
          from outbox.meta m
    ),
    places as (
        select n.*, lead(n.begins_at) over w as next_begins_at, lead(n.begins_in) over w as next_begins_in
          from outbox.shard s
         cross join lateral (
            select p.sink, p.shard, p.seq, p.ended_at,
                   greatest(p.a_seq, p.b_seq, p.last_id) as begins_at,
                   outbox.newest_xid(p.a_snapshot, p.b_snapshot) as begins_in,
                   greatest(p.end_a_seq, p.end_b_seq, p.end_last_id) as ends_at,
                   outbox.newest_xid(p.end_a_snapshot, p.end_b_snapshot) as ends_in
              from outbox.sink_pass p
             where p.sink = s.sink and p.shard = s.shard
             order by p.seq
             limit most + 1
         ) n
        window w as (partition by n.sink, n.shard order by n.seq)
    ),
    judged as (
        select n.sink, n.shard, n.seq,
               bool_and(coalesce(k.lowest > k.floor and n.next_begins_at < k.lowest and n.next_begins_in <= k.oldest
                                 and (n.ended_at is null or n.ends_at < k.lowest and n.ends_in <= k.oldest), false))
                   over (partition by n.sink, n.shard order by n.seq) as past
          from places n
         cross join kept k
    )
    delete from outbox.sink_pass p
     using judged j
     where p.sink = j.sink and p.shard = j.shard and p.seq = j.seq and j.past;
    get diagnostics removed = row_count;
    delete from outbox.sink_patterns t
     where not exists (select from outbox.sink_pass p where p.sink = t.sink and p.generation = t.generation)
       and not exists (select from outbox.shard s where s.sink = t.sink and s.generation = t.generation)
       and not exists (select from outbox.sink k where k.name = t.sink and k.generation = t.generation);
    delete from outbox.row_ahead w
     where (w.sink, w.id) in (select o.sink, o.id from outbox.row_ahead o
                               where o.id < (select min(e.id) from outbox.event e) limit 1000);
    delete from outbox.late_position l
     where l.ctid = any (array(
            select o.ctid from outbox.late_position o
             where greatest(o.a_seq, o.b_seq, o.last_id) < (select min(e.id) from outbox.event e)
               and outbox.newest_xid(o.a_snapshot, o.b_snapshot)
                   <= (select e.xid from outbox.event e order by e.xid limit 1)
               and (select m.floor from outbox.meta m) < (select min(e.id) from outbox.event e)
             limit 1000));
    return removed;
end
$$;

-- The transaction from which on a position shows none.
create function outbox.newest_xid(a pg_snapshot, b pg_snapshot) returns xid8
language sql immutable
return greatest(pg_snapshot_xmax(a),
                case when b::text <> '9223372036854775807:9223372036854775807:' then pg_snapshot_xmax(b) end);
