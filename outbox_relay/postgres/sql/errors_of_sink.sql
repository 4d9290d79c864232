-- The newest errors of a sink, newest first, at most `most`: its last error as relays report it, without a uid, and those
-- of deliveries. Of these, the `looks` newest dead ones and the `looks` waiting ones that are due first are looked at.
with rows as materialized (
    (select d.uid, d.type, d.state, d.ordered, d.deliver_at, d.attempts, d.last_error, d.last_status, d.last_attempt_at, d.since
       from outbox.delivery d
      where d.sink = %(sink)s::text and d.state = 'dead'
      order by d.id desc
      limit %(looks)s::integer)
    union all
    (select d.uid, d.type, d.state, d.ordered, d.deliver_at, d.attempts, d.last_error, d.last_status, d.last_attempt_at, d.since
       from outbox.delivery d
      where d.sink = %(sink)s::text and d.state = 'waiting'
      order by d.due_at, d.id
      limit %(looks)s::integer)
)
select e.at, e.error, e.status, e.uid, e.type, e.state, e.attempts
  from (
    select outbox_internal.loadable_time(coalesce(r.last_attempt_at, r.since)) as at, r.last_error as error, r.last_status as status,
           r.uid, r.type::text as type, r.state as state, r.attempts
      from rows r
     where r.last_error is not null
    union all
    select outbox_internal.loadable_time(k.last_error_at), k.last_error, null, null, null, null, null
      from outbox.sink k
     where k.name = %(sink)s::text and k.last_error is not null
  ) e
 order by e.at desc nulls last, e.uid
 limit %(most)s::integer
