-- An event and its states, as `why --json` shows them but for the recorded attempts; null if neither the log, a row, a mark
-- nor a record has it.
-- As in version 8.
-- As in version 15, with tenant and priority.
create or replace function outbox.why(wanted uuid) returns json
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    with known as (
        (select 1 as place, e.id, e.shard, e.type, e.key, e.tenant, e.priority, e.created_at
           from outbox.event e where e.uid = wanted order by e.id + 0 desc limit 1)
        union all
        (select 2, d.id, d.shard, d.type, d.key, null, null, d.created_at
           from outbox.delivery d where d.uid = wanted order by d.id desc limit 1)
        union all
        (select 3, m.id, null, null, null, null, null, null from outbox.discarded m
          where m.uid = wanted order by m.id desc limit 1)
        union all
        (select 4, a.id, null, null, null, null, null, null from outbox.attempt a
          where a.uid = wanted order by a.id desc limit 1)
    )
    select json_build_object(
               'uid', wanted, 'type', k.type, 'key', k.key, 'tenant', k.tenant, 'priority', k.priority, 'id', k.id,
               'shard', k.shard, 'in_log', k.place = 1,
               'created_at', k.created_at, 'age_seconds', outbox_internal.in_seconds(now() - outbox_internal.loadable_time(k.created_at)),
               'sinks', coalesce((select json_object_agg(s.sink, jsonb_build_object('state', s.state) || s.details
                                                         order by s.sink)
                                    from outbox_internal.event_states(wanted) s), '{}'))
      from known k
     order by k.place
     limit 1
$$;

-- The state of an event in each sink, as in version 15. A scheduled event that no sink has read yet is shown as it was changed.
-- As in version 21, and a scheduled event that no sink has read yet is shown with the spread of the sink.
create or replace function outbox_internal.event_states(wanted uuid) returns table (sink text, state text, details jsonb)
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
    select s.sink, case when s.mended then 'settled' else s.state end,
           case when s.mended then '{}' else s.details end
           || case when s.delivered and s.details ? 'again' then jsonb_build_object('again', true) else '{}' end
           || case when s.replays is null then '{}' else jsonb_build_object('replays', s.replays) end
      from (
        select p.sink,
               case when p.state not in ('pending', 'scheduled') then p.state
                    when c.uid is not null and c.deliver_at is null then 'discarded'
                    when t.due > now() then 'scheduled'
                    else p.state end as state,
               case when p.state not in ('pending', 'scheduled') then p.details
                    when c.uid is not null and c.deliver_at is null
                    then jsonb_build_object('at', c.changed_at, 'by', null, 'role', c.emitter, 'reason', 'cancelled')
                    when t.due is null or t.due <= now() and c.uid is null then p.details
                    else p.details || jsonb_build_object('due_in_seconds',
                                                         outbox_internal.in_seconds(outbox_internal.loadable_time(t.due) - now())) end
                   as details,
               r.replays, r.delivered,
               coalesce(r.settled, false)
                   and (p.state in ('not routed', 'passed over')
                        or p.state = 'unknown' and p.details ->> 'reason' <> 'rebase needed') as mended
          from outbox_internal.passage_states(wanted) p
          left join outbox_internal.replay_outcomes(wanted) r on r.sink = p.sink
          left join (
            select l.created_at, l.deliver_at from outbox.event l where l.uid = wanted order by l.id + 0 desc limit 1
          ) e on true
          left join outbox.scheduled_change c on c.uid = wanted and c.created_at = e.created_at
         cross join lateral (
            -- A row has its own time, unless a change is to be carried out on it.
            select case when c.uid is not null or not p.details ? 'attempts' and e.deliver_at > e.created_at
                        then coalesce(c.deliver_at, e.deliver_at) end as at
         ) o
         cross join lateral (
            select case when o.at > e.created_at and o.at < '9998-01-01 00:00:00+00'
                        then o.at + outbox_internal.spread_of(p.sink, wanted) else o.at end as due
         ) t
      ) s
$$;

-- The state of an event in each sink, in the words of `why --json`, with what else is known of it. Of an event that is no
-- longer in the log its rows, marks and recorded attempts are known. No payload and no header is returned.
--
-- The first that holds: erased · its row · discarded · not passed yet, by patterns that match (scheduled, pending) ·
-- delivered, as recorded · settled by a pass whose patterns match · not routed by any pass · passed over · unknown.
-- As in version 7, from the starts of the ledgers.
create or replace function outbox_internal.passage_states(wanted uuid) returns table (sink text, state text, details jsonb)
language sql stable security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set jit = off
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
    recorded as materialized (
        select r.sink, r.details
          from outbox_internal.recorded_deliveries(wanted, (select l.id from logged l), (select l.created_at from logged l)) r
    ),
    -- After a restore, until the log is rebased, positions say nothing about new events.
    home as materialized (
        select m.system_identifier is distinct from (select c.system_identifier from pg_control_system() c)
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
        select k.name, l.id, l.type, l.erased, coalesce(l.deliver_at > now(), false) as later,
               l.deliver_at, l.key, l.shard, p.passed, p.covered, p.routed, p.over_by, p.over_at,
               p.doubtful, p.forgotten,
               coalesce(p.reading and o.name is not null, false) as reading, o.name as owner, o.lease_seconds,
               outbox_internal.type_matches(k.patterns, l.type) as wanted, k.paused, k.circuit, k.last_error
          from outbox.sink k
          left join logged l on true
          left join lateral outbox_internal.passage(k.name, l.shard, l.id, l.xid, l.type) p on l.id is not null
          left join lateral (
            select coalesce(n.name, h.owner::text) as name, outbox_internal.in_seconds(h.lease_until - now()) as lease_seconds
              from outbox.shard h left join outbox.relay n on n.id = h.owner
             where h.sink = k.name and h.shard = l.shard and h.owner is not null and h.lease_until > now()
          ) o on true
    ),
    judged as (
        select k.*,
               case when k.erased then 'erased'
                    when d.id is not null and d.lease_until > now() then 'waiting'
                    when d.id is not null then outbox_internal.delivery_state(d.state, d.ordered, d.deliver_at)
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
                                            'lease_seconds', outbox_internal.in_seconds(d.lease_until - now()))
                    else '{}' end
               || case when j.state in ('waiting', 'scheduled')
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
           when j.state in ('pending', 'scheduled') then
               case when j.state = 'scheduled'
                    then jsonb_build_object('due_in_seconds', outbox_internal.in_seconds(outbox_internal.loadable_time(j.deliver_at) - now())) else '{}' end
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

-- Tells if a shard has passed an event, and how. `passed`: by its position. `covered`: a pass has read over it, or an
-- owner has settled it after its pass had ended; `routed`: under patterns that match its type. `reading`: so do those
-- of the open pass. `over_by` and `over_at`: the registration ('start') or seek that last put the shard behind
-- it, when nothing had read it. `doubtful`: a pass that matches ended before it, with more rows than are known.
-- `forgotten`: a rebase came since, and the sink was there before.
-- As in version 7, from the start of the ledger.
create or replace function outbox_internal.passage(
    sink_name text, event_shard smallint, event_id bigint, event_xid xid8, event_type text,
    out passed boolean, out covered boolean, out routed boolean, out reading boolean, out doubtful boolean,
    out over_by text, out over_at timestamptz, out forgotten boolean
)
language sql stable
set search_path = pg_catalog, pg_temp
set jit = off
as $$
    with ledger as materialized (
        select p.seq, p.epochs[array_position(p.shards, event_shard)] as epoch,
               outbox_internal.position_passed(event_id, event_xid, p.a_seq, p.a_snapshot, p.a_next, p.b_snapshot, p.last_id,
                                      m.floor) as passed
          from outbox.sink k
         cross join lateral (select g.* from outbox.progress g where g.sink = k.name and g.seq >= k.ledger_start offset 0) p
         cross join outbox.meta m
         where k.name = sink_name and event_shard = any (p.shards)
    ),
    place as materialized (
        select coalesce((select l.passed from ledger l order by l.epoch desc, l.seq desc limit 1), false) as passed
    ),
    late as materialized (
        select v.seq
          from outbox_internal.pass_spans(sink_name, event_shard) v
         where exists (select from ledger l
                        where l.passed and l.epoch >= v.epoch and l.epoch < v.next_epoch and l.seq > v.final_seq)
            or exists (select from outbox.late_position l
                        where l.sink = sink_name and l.shard = event_shard and l.epoch >= v.epoch and l.epoch < v.next_epoch
                          and outbox_internal.position_passed(event_id, event_xid, l.a_seq, l.a_snapshot, l.a_next, l.b_snapshot,
                                                     l.last_id, (select m.floor from outbox.meta m)))
    ),
    bounds as (
        select p.seq, p.kind, p.generation, p.begun_at, p.ended_at, p.more_rows,
               outbox_internal.position_passed(event_id, event_xid, p.a_seq, p.a_snapshot, p.a_next, p.b_snapshot, p.last_id,
                                      m.floor) as at_begin,
               case when p.ended_at is not null
                    then outbox_internal.position_passed(event_id, event_xid, p.end_a_seq, p.end_a_snapshot, p.end_a_next,
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
               outbox_internal.type_matches(t.patterns, event_type) as wanted
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

-- The passes of a shard that have ended: the epochs of their owners (up to `next_epoch`), and the row of the ledger that was the
-- last one to count.
create or replace function outbox_internal.pass_spans(sink_name text, of_shard smallint) returns table (
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

-- Begin passes of a sink where its shards stand, under its generation, whatever passes there are.
create or replace function outbox_internal.begin_passes(sink_name text, pass_kind text) returns void
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
create or replace function outbox_internal.end_passes(sink_name text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    complete constant boolean := outbox_internal.keep_rows_ahead(sink_name, array(select generate_series(0, 63))::smallint[]);
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

-- Remove passes that no event of the log can need, of each shard up to 10 of the oldest, and return how many. Those go whose
-- end, and the beginning of the next one, have passed no event that is kept: all have higher ids and transactions. Ids of
-- an older numbering cannot be compared, so nothing goes while there are any. Patterns follow when no pass refers to them.
-- As in version 7. A pass stays for an hour after the next one has begun, and while its owners have written a position after
-- its end that has passed an event that is kept: an owner that has not noticed a seek, or was suspended, settles what it has
-- delivered, and only the pass says under which patterns it did.
-- As in version 32, from the start of the ledger of each sink, and without its shards, which have many dead versions.
create or replace function outbox_internal.trim_passes() returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_hashjoin = on
set enable_seqscan = off
set jit = off
as $$
declare
    most constant integer := 10;
    stays constant interval := interval '1 hour';
    removed bigint;
begin
    with kept as materialized (
        select coalesce((select min(e.id) from outbox.event e), 9223372036854775807) as lowest,
               coalesce((select e.xid from outbox.event e order by e.xid limit 1), '9223372036854775807') as oldest,
               m.floor
          from outbox.meta m
    ),
    places as materialized (
        select n.*, lead(n.begins_at) over w as next_begins_at, lead(n.begins_in) over w as next_begins_in,
               lead(n.begun_at) over w as next_begun_at, lead(n.epoch) over w as next_epoch,
               coalesce(n.end_seq, lead(n.begun_seq) over w) as final_seq
          from (select k.name as sink, m::smallint as shard from outbox.sink k cross join generate_series(0, 63) m) s
         cross join lateral (
            select p.sink, p.shard, p.seq, p.epoch, p.begun_at, p.begun_seq, p.ended_at, p.end_seq,
                   greatest(p.a_seq, p.b_seq, p.last_id) as begins_at,
                   outbox_internal.newest_xid(p.a_snapshot, p.b_snapshot) as begins_in,
                   greatest(p.end_a_seq, p.end_b_seq, p.end_last_id) as ends_at,
                   outbox_internal.newest_xid(p.end_a_snapshot, p.end_b_snapshot) as ends_in
              from outbox.sink_pass p
             where p.sink = s.sink and p.shard = s.shard
             order by p.seq
             limit most + 1
         ) n
        window w as (partition by n.sink, n.shard order by n.seq)
    ),
    -- Of the passes that are looked at. Nearly all rows of the ledger are at these epochs.
    newest as materialized (
        select k.sink, array(select coalesce(max(n.epoch), 0)
                               from generate_series(0, 63) of_shard left join places n on n.sink = k.sink and n.shard = of_shard
                              group by of_shard order by of_shard) as epochs
          from (select distinct n.sink from places n where n.next_epoch is not null) k
    ),
    late as (
        select l.sink, l.shard, l.epoch, l.seq, greatest(l.a_seq, l.b_seq, l.last_id) as ends_at,
               outbox_internal.newest_xid(l.a_snapshot, l.b_snapshot) as ends_in
          from outbox.late_position l
        union all
        -- Those that outbox_internal.keep_late will keep when the ledger is trimmed.
        select g.sink, u.shard, u.epoch, g.seq, greatest(g.a_seq, g.b_seq, g.last_id),
               outbox_internal.newest_xid(g.a_snapshot, g.b_snapshot)
          from newest c
          join outbox.sink k on k.name = c.sink
         cross join lateral (select p.* from outbox.progress p where p.sink = k.name and p.seq >= k.ledger_start offset 0) g
         cross join lateral unnest(g.shards, g.epochs) u (shard, epoch)
         where u.epoch < c.epochs[u.shard + 1]
    ),
    held as (
        select distinct n.sink, n.shard, n.seq
          from places n
          join late l on l.sink = n.sink and l.shard = n.shard and l.epoch >= n.epoch and l.epoch < n.next_epoch
                         and l.seq > n.final_seq
         cross join kept k
         where l.ends_at >= k.lowest or l.ends_in > k.oldest
    ),
    judged as (
        select n.sink, n.shard, n.seq,
               bool_and(coalesce(k.lowest > k.floor and n.next_begins_at < k.lowest and n.next_begins_in <= k.oldest
                                 and (n.ended_at is null or n.ends_at < k.lowest and n.ends_in <= k.oldest)
                                 and h.seq is null
                                 -- A time in the future is of a clock that has been set back since.
                                 and n.next_begun_at not between clock_timestamp() - stays and clock_timestamp() + stays, false))
                   over (partition by n.sink, n.shard order by n.seq) as past
          from places n
          left join held h on h.sink = n.sink and h.shard = n.shard and h.seq = n.seq
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
    -- A rename locks these before the passes.
    delete from outbox.late_position l
     where l.ctid = any (array(
            select o.ctid from outbox.late_position o
             where greatest(o.a_seq, o.b_seq, o.last_id) < (select min(e.id) from outbox.event e)
               and outbox_internal.newest_xid(o.a_snapshot, o.b_snapshot)
                   <= (select e.xid from outbox.event e order by e.xid limit 1)
               and (select m.floor from outbox.meta m) < (select min(e.id) from outbox.event e)
             limit 1000
               for update skip locked));
    return removed;
end
$$;

-- Another sink of a removed sink's name has passed nothing.
create or replace function outbox_internal.passes_deleted() returns trigger
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

-- The newest recorded delivery of an event by each sink. An attempt counts for the sink that had its name then, under
-- whatever name it is now known: a name that another sink had before lends nothing. `wanted_id` and
-- `since` are the id of the event in the log, where a rebase may have given it another one, and when it was emitted: an
-- earlier event may have had its uid.
create or replace function outbox_internal.recorded_deliveries(wanted uuid, wanted_id bigint, since timestamptz) returns table (sink text, details jsonb)
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

-- Remove marks of discarded events whose ids are below those of the log, looking at the first `most` (1,000; at most 10,000)
-- of each sink, and return how many were removed. Cancelled events have such marks too, so there may be as many as events.
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

