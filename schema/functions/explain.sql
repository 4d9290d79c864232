-- An event and its states, as `why --json` shows them but for the recorded attempts; null if neither the log, a row, a mark
-- nor a record has it, and it is not scheduled. `emitted_at` is the time of the emit of an event that was scheduled.
create or replace function outbox.why(wanted uuid) returns json
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    with known as (
        (select 0 as place, null::bigint as id, outbox_internal.shard_of(s.key, s.uid) as shard, s.type, s.key, s.tenant,
                s.priority, s.created_at, s.created_at as emitted_at, s.deliver_at
           from outbox.scheduled s where s.uid = wanted)
        union all
        (select 1, e.id, e.shard, e.type, e.key, e.tenant, e.priority, e.created_at, e.emitted_at, e.deliver_at
           from outbox.event e where e.id = (select outbox_internal.event_id(wanted)) and e.uid = wanted limit 1)
        union all
        (select 2, d.id, d.shard, d.type, d.key, null, null, d.created_at, null, d.deliver_at
           from outbox.delivery d where d.uid = wanted order by d.id desc limit 1)
        union all
        (select 3, m.id, null, null, null, null, null, null, null, null from outbox.discarded m
          where m.uid = wanted order by m.id desc limit 1)
        union all
        (select 4, a.id, null, null, null, null, null, null, null, null from outbox.attempt a
          where a.uid = wanted order by a.id desc limit 1)
    ),
    -- Of a scheduled event those of the sinks that take its type, and otherwise with what replays have done of it.
    states as (
        select k.name as sink, case when n.is_routed then 'scheduled' else 'not routed' end as state,
               case when n.is_routed
                    then jsonb_build_object('due_in_seconds', outbox_internal.in_seconds(
                             s.deliver_at + outbox_internal.spread_of(k.name, s.uid) - now()))
                    else '{}' end as details
          from outbox.scheduled s
         cross join outbox.sink k
         cross join lateral (select outbox_internal.type_matches(k.patterns, s.type) as is_routed) n
         where s.uid = wanted
        union all
        select p.sink, case when m.mended then 'settled' else p.state end,
               case when m.mended then '{}' else p.details end
               || case when r.delivered and not m.mended and p.details ? 'again' then jsonb_build_object('again', true) else '{}' end
               || case when r.replays is null then '{}' else jsonb_build_object('replays', r.replays) end
          from outbox_internal.routed_states(wanted) p
          left join outbox_internal.replay_outcomes(wanted) r on r.sink = p.sink
         cross join lateral (
            select coalesce(r.settled, false)
                   and (p.state in ('not routed', 'passed over')
                        or p.state = 'unknown' and p.details ->> 'reason' <> 'rebase needed') as mended
          ) m
         where not exists (select from outbox.scheduled s where s.uid = wanted)
    )
    select json_build_object(
               'uid', wanted, 'type', k.type, 'key', k.key, 'tenant', k.tenant, 'priority', k.priority, 'id', k.id,
               'shard', k.shard, 'in_log', k.place = 1,
               'created_at', k.created_at, 'emitted_at', k.emitted_at,
               'deliver_at', outbox_internal.loadable_time(k.deliver_at), 'age_seconds', outbox_internal.in_seconds(now() - outbox_internal.loadable_time(k.created_at)),
               'sinks', coalesce((select json_object_agg(s.sink, jsonb_build_object('state', s.state) || s.details
                                                         order by s.sink)
                                    from states s), '{}'))
      from known k
     order by k.place
     limit 1
$$;
comment on function outbox.why is
    'An event and its state in each sink as JSON, as `outbox-relay why` explains it; null if nothing knows the event.';

-- The state of an event in each sink, in the words of `why --json`, with what else is known of it. Of an event that is no
-- longer in the log its rows, marks and recorded attempts are known. No payload and no header is returned.
--
-- The first that holds: erased · its row · discarded · not passed yet, by patterns that match (pending) ·
-- delivered, as recorded · settled under routes that match · unknown · not routed · passed over.
create or replace function outbox_internal.routed_states(wanted uuid) returns table (sink text, state text, details jsonb)
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set jit = off
as $$
    with logged as materialized (
        select e.id, e.shard, e.xid, e.type, e.key, e.created_at,
               outbox_internal.is_erased(e.content_type, e.payload) as erased
          from outbox.event e
         where e.id = (select outbox_internal.event_id(wanted)) and e.uid = wanted
         limit 1
    ),
    parked as materialized (
        select distinct on (d.sink)
               d.sink, d.id, d.key, d.state, d.ordered, d.due_at, d.attempts, d.lease_until, d.owner, d.last_error,
               d.last_status, d.last_attempt_at, outbox_internal.last_attempt_of(d.sink, d.id) as last_attempt, d.since
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
    -- A sink that was removed and had the same name lends nothing. A rebase may have given the event another id; an earlier event
    -- may have had its uid.
    recorded as materialized (
        select distinct on (k.name)
               k.name as sink,
               jsonb_strip_nulls(jsonb_build_object(
                   'at', a.at, 'attempt', a.number, 'relay', a.relay, 'status', a.status, 'milliseconds', a.milliseconds,
                   'topic', a.detail -> 'topic', 'partition', a.detail -> 'partition', 'offset', a.detail -> 'offset')) as details
          from outbox.attempt a
          left join logged l on true
          join outbox.sink k on k.name = a.sink
         where a.uid = wanted and a.outcome = 'delivered'
           and (l.id is null or a.id = l.id
                or (l.id <= (select m.floor from outbox.meta m) and a.at >= l.created_at))
           and a.at > k.created_at
         order by k.name, a.at desc, a.number desc
    ),
    -- After a restore, until the log is rebased, positions say nothing about new events.
    home as materialized (
        select outbox_internal.elsewhere()
                   or exists (select from outbox.sink k
                              cross join lateral (
                                select g.a_seq, g.last_id from outbox.progress g
                                 where g.sink = k.name and g.seq >= k.ledger_start offset 0
                              ) p
                               where greatest(p.a_seq, p.last_id) > coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0))
                   as restored
          from outbox.meta m
    ),
    known as (
        select k.name, l.id, l.type, l.erased, l.key, l.shard, p.passed, p.covered, p.routed, p.over_by, p.over_at,
               p.doubtful, p.forgotten,
               -- A session of other routes drains.
               coalesce(p.doubtful and o.generation <> k.generation, false) as reading, o.name as owner, o.lease_seconds,
               outbox_internal.type_matches(k.patterns, l.type) as wanted, k.paused, k.circuit, k.last_error
          from outbox.sink k
          left join logged l on true
          left join lateral outbox_internal.event_routing(k.name, l.shard, l.id, l.xid, l.type) p on l.id is not null
          left join lateral (
            select coalesce(n.name, h.owner::text) as name, h.generation,
                   outbox_internal.in_seconds(h.lease_until - now()) as lease_seconds
              from outbox.owned h left join outbox.relay n on n.id = h.owner
             where h.sink = k.name and h.shard = l.shard
          ) o on true
    ),
    judged as (
        select k.*,
               case when k.erased then 'erased'
                    when d.id is not null and d.lease_until > now() then 'waiting'
                    when d.id is not null then d.state
                    when m.sink is not null then 'discarded'
                    when (select h.restored from home h) then 'unknown'
                    when (k.wanted or k.reading) and not k.passed then 'pending'
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
         where j.state in ('pending', 'waiting', 'held')
    )
    select j.name, j.state,
           case
           when j.state = 'erased' then '{}'
           when d.id is not null then
               case when d.lease_until > now()
                    then jsonb_build_object('relay', coalesce(w.name, d.owner::text),
                                            'lease_seconds', outbox_internal.in_seconds(d.lease_until - now()))
                    else '{}' end
               || case when j.state = 'waiting'
                       then jsonb_build_object('due_in_seconds', outbox_internal.in_seconds(outbox_internal.loadable_time(d.due_at) - now())) else '{}' end
               || case when j.state in ('waiting', 'held') then s.behind else '{}' end
               || jsonb_build_object(
                      'attempts', d.attempts, 'last_error', d.last_error, 'last_status', d.last_status,
                      'last_attempt', d.last_attempt
                          || jsonb_build_object('seconds_ago', outbox_internal.in_seconds(now() - outbox_internal.loadable_time(d.last_attempt_at))))
               || case when j.state = 'dead'
                       then jsonb_build_object('since_seconds',
                                               outbox_internal.in_seconds(now() - outbox_internal.loadable_time(coalesce(d.last_attempt_at, d.since))))
                       else coalesce(s.sink, '{}') end
           when j.state = 'discarded' then
               jsonb_build_object('at', m.at, 'by', m.actor, 'role', m.role_name, 'reason', m.reason)
           when j.state = 'pending' then
               jsonb_build_object('owner', j.owner, 'lease_seconds', j.lease_seconds)
               || s.behind || s.sink || jsonb_build_object('again', coalesce(j.routed or r.sink is not null, false))
           when j.state = 'delivered' then r.details
           when j.state = 'passed over' then jsonb_build_object('by', j.over_by, 'at', j.over_at)
           when j.state = 'unknown' then
               jsonb_build_object('reason', case when (select h.restored from home h) then 'rebase needed'
                                                 when j.id is null then 'past retention'
                                                 when j.forgotten then 'before a rebase'
                                                 when j.over_by is not null then 'sink moved'
                                                 else 'routes changed' end)
           else '{}' end
      from judged j
      left join parked d on d.sink = j.name
      left join marked m on m.sink = j.name
      left join recorded r on r.sink = j.name
      left join stopped s on s.name = j.name
      left join outbox.relay w on w.id = d.owner
     order by j.name
$$;

-- What is known of the way of an event past a shard of a sink. `passed`: the position of the shard has passed it. The routes of a
-- change may have been those under which it was read, unless the shard was past it then, if the shard was past it at the next
-- change, or if relays may still have delivered it afterwards. Between two moves of the sink (start, seek, rebase) it is read
-- once. `routed`: a reading that is complete was under routes that all match. `doubtful`: some routes match. `covered`: a reading
-- is complete. `over_by`, `over_at`: what put the sink behind it. `forgotten`: a rebase came after it was passed.
create or replace function outbox_internal.event_routing(
    sink_name text, event_shard smallint, event_id bigint, event_xid xid8, event_type text,
    out passed boolean, out routed boolean, out doubtful boolean, out covered boolean, out over_by text, out over_at timestamptz,
    out forgotten boolean
)
language sql stable
set search_path = pg_catalog, pg_temp
set jit = off
as $$
    with place as materialized (
        select coalesce((select outbox_internal.position_passed(event_id, event_xid, n.a_seq, n.a_snapshot, n.a_next,
                                                                n.b_snapshot, n.last_id, m.floor)
                           from outbox.standing n cross join outbox.meta m
                          where n.sink = sink_name and n.shard = event_shard), false) as passed
    ),
    changes as (
        select r.seq, r.kind, r.at, r.patterns, coalesce(r.upto_id, 9223372036854775807) as upto_id,
               coalesce(outbox_internal.position_passed(
                   event_id, event_xid, r.a_seqs[event_shard + 1], r.a_snapshots[event_shard + 1], r.a_nexts[event_shard + 1],
                   r.b_snapshots[event_shard + 1], r.last_ids[event_shard + 1], m.floor), false) as begun
          from outbox.sink_route r cross join outbox.meta m
         where r.sink = sink_name
    ),
    spans as (
        select c.kind, c.at, c.seq, c.begun, c.patterns, coalesce(lag(c.begun) over w, false) as begun_before,
               coalesce(lead(c.begun) over w, (select p.passed from place p)) as ended, lead(c.upto_id) over w as upto_id,
               count(*) filter (where c.kind in ('start', 'seek', 'rebase')) over w as reading
          from changes c
        window w as (order by c.seq)
    ),
    readings as (
        select s.reading, bool_or(s.ended) as complete,
               bool_or(outbox_internal.type_matches(s.patterns, event_type))
                   filter (where not s.begun and (s.ended or event_id <= s.upto_id)) as some_match,
               bool_and(outbox_internal.type_matches(s.patterns, event_type))
                   filter (where not s.begun and (s.ended or event_id <= s.upto_id)) as all_match
          from spans s
         where s.kind <> 'end'
         group by s.reading
    ),
    moves as (
        select s.kind, s.at from spans s
         where s.kind in ('start', 'seek') and s.begun and not s.begun_before
         order by s.seq desc limit 1
    )
    select (select p.passed from place p), coalesce(bool_or(r.complete and r.all_match), false),
           coalesce(bool_or(r.some_match), false), coalesce(bool_or(r.complete and r.some_match is not null), false),
           (select v.kind from moves v), (select v.at from moves v),
           exists (select from spans s where s.kind = 'rebase' and s.begun)
      from readings r
$$;

-- Record that the routes or the place of a sink change, and where its shards stand, in the transaction of the change. While
-- relays own shards, they may deliver on under the routes before, up to an id that is known after the commit (see
-- outbox_internal.trim_routes). Without an owner only events with a row are delivered. A claim locks the table before it has
-- its snapshot: under the lock none is under way that may yet count for the routes before.
create or replace function outbox_internal.record_routes(sink_name text, change text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    upto bigint;
begin
    begin
        lock table outbox.shard in share row exclusive mode nowait;
        if not exists (select from outbox.shard s where s.sink = sink_name and s.owner is not null) then
            upto := coalesce((select max(d.id) from outbox.delivery d where d.sink = sink_name), 0);
        end if;
    exception when lock_not_available then
        null;  -- it may be a claim
    end;
    insert into outbox.sink_route (sink, kind, patterns, newest_id, upto_id, a_seqs, a_snapshots, a_nexts, b_snapshots, last_ids)
    select k.name, change, k.patterns, coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0), upto,
           array_agg(n.a_seq order by m), array_agg(n.a_snapshot order by m), array_agg(n.a_next order by m),
           array_agg(n.b_snapshot order by m), array_agg(n.last_id order by m)
      from outbox.sink k
     cross join generate_series(0, 63) m
      left join outbox.standing n on n.sink = k.name and n.shard = m
     where k.name = sink_name
     group by k.name;
end
$$;

-- Write down up to which id relays may have delivered under the routes before each change that is committed: none reads what is
-- committed after it. Remove the routes that no event of the log can have been read under, and up to 1,000 exceptions of replays
-- whose events the log no longer has; return how many.
create or replace function outbox_internal.trim_routes() returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    lowest constant bigint := coalesce((select min(e.id) from outbox.event e), 9223372036854775807);
    removed bigint;
    exceptions bigint;
begin
    delete from outbox.replay_exception x
     where (x.id, x.replay) in (select o.id, o.replay from outbox.replay_exception o where o.id < lowest order by o.id limit 1000);
    get diagnostics exceptions = row_count;
    update outbox.sink_route r
       set upto_id = coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0)
     where r.upto_id is null;
    delete from outbox.sink_route r
     using (select o.sink, o.seq, lead(greatest(o.newest_id, o.upto_id)) over (partition by o.sink order by o.seq) as until_id
              from outbox.sink_route o) n
     where n.sink = r.sink and n.seq = r.seq and n.until_id < lowest;
    get diagnostics removed = row_count;
    return removed + exceptions;
end
$$;

-- Remove marks of discarded events whose ids are below those of the log, looking at the first `most` (1,000; at most 10,000)
-- of each sink, and return how many were removed.
-- A mark stays for a week, since a dead letter may have been discarded long after its event had left the log, and
-- outbox.why says by whom.
create or replace function outbox_internal.trim_discarded(most integer) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    lowest constant bigint := (select min(e.id) from outbox.event e);
    removed bigint;
begin
    delete from outbox.discarded m
     where m.ctid = any (array(
            select o.ctid
              from outbox.sink k
             cross join lateral (
                select d.ctid, d.at from outbox.discarded d
                 where d.sink = k.name and d.id < lowest
                 order by d.id
                 limit least(greatest(coalesce(most, 1000), 1), 10000)
             ) o
             where o.at < clock_timestamp() - interval '7 days'));
    get diagnostics removed = row_count;
    return removed;
end
$$;
