-- The place of an event: a row per sink, with its state in the log, in `delivery` or in both.
--
-- `settled` is true if the position of its shard has passed it (see outbox_relay/domain/window.py): the event is
-- visible in A, or it is visible in B and not after the last id done. Ids up to the floor belong to an older
-- numbering, whose last window ends at B: of its ids up to A's sequence value only those that were running at A are
-- left. `behind_uid` is the row at the head of its key, if that precedes this event; dead rows come last.
with logged as (
    select e.id, e.shard, e.xid, e.uid, e.type, e.key, e.deliver_at, e.created_at
      from outbox.event e
     where e.uid = %(uid)s::uuid
     order by e.id + 0 desc
     limit 1
),
parked as (
    select distinct on (d.sink) d.*
      from outbox.delivery d
     where d.uid = %(uid)s::uuid
     order by d.sink, d.id desc
),
event as (
    select l.id, l.shard, l.xid, l.uid, l.type, l.key, l.deliver_at, l.created_at, true as in_log from logged l
    union all
    (select p.id, p.shard, null, p.uid, p.type, p.key, p.deliver_at, p.created_at, false
       from parked p where not exists (select from logged) limit 1)
)
select e.id, e.shard, e.uid::text, e.type, e.key, e.in_log, e.created_at,
       extract(epoch from now() - e.created_at)::double precision as age_seconds,
       extract(epoch from e.deliver_at - now())::double precision as deliver_in,
       k.sink, s.patterns, s.paused, s.circuit, s.last_error as sink_error,
       s.start = 'now' and e.created_at < s.created_at as before_start,
       p.settled,
       case when h.lease_until > now() then coalesce(o.name, h.owner::text) end as owner,
       extract(epoch from h.lease_until - now())::double precision as owned_for,
       d.state, d.attempts, d.last_error, d.last_status, d.last_attempt,
       extract(epoch from now() - d.last_attempt_at)::double precision as tried_seconds,
       extract(epoch from d.due_at - now())::double precision as due_in,
       extract(epoch from now() - coalesce(d.last_attempt_at, d.since))::double precision as since_seconds,
       case when d.lease_until > now() then extract(epoch from d.lease_until - now())::double precision end as leased_for,
       coalesce(w.name, d.owner::text) as leased_by,
       b.uid::text as behind_uid, b.state as behind_state
  from event e
  left join (select name as sink from outbox.sink union select sink from parked) k on true
  left join outbox.sink s on s.name = k.sink
  left join parked d on d.sink = k.sink
  left join outbox.relay w on w.id = d.owner
  left join outbox.shard h on h.sink = k.sink and h.shard = e.shard
  left join outbox.relay o on o.id = h.owner
  left join lateral (
    select case when n.b_snapshot::text = '9223372036854775807:9223372036854775807:'
                then e.id <= n.last_id
                     or (e.id <= n.a_seq
                         and (pg_visible_in_snapshot(e.xid, n.a_snapshot) or e.xid >= n.a_next::text::xid8))
                else pg_visible_in_snapshot(e.xid, n.a_snapshot)
                     or e.id <= least((select m.floor from outbox.meta m), n.a_seq)
                     or coalesce(pg_visible_in_snapshot(e.xid, n.b_snapshot) and e.id <= n.last_id, false)
           end as settled
      from outbox.standing n
     where n.sink = k.sink and n.shard = e.shard
  ) p on true
  left join lateral (
    select f.uid, f.state
      from outbox.delivery f
     where f.sink = k.sink and f.key = e.key and f.id < e.id and f.ordered
     order by f.state = 'dead', f.id
     limit 1
  ) b on true
 order by k.sink
