-- The unsettled events of one sink: its rows of `delivery` by state, and the remaining events of the log.
-- Scheduled rows are those whose event's own time has not come.
select b.events + r.waiting + r.held as backlog, b.exact, r.waiting, r.held, r.dead, b.scheduled + r.scheduled as scheduled,
       greatest(0, coalesce(extract(epoch from now() - outbox_internal.loadable_time(least(b.oldest, r.oldest))), 0))::double precision
           as oldest_seconds
  from outbox_internal.backlog(%(sink)s::text, %(types)s::text[], %(most)s::integer, %(seconds)s::double precision) b
 cross join (
    select count(*) filter (where d.state = 'waiting' and not d.later) as waiting,
           count(*) filter (where d.state = 'waiting' and d.later) as scheduled,
           count(*) filter (where d.state = 'held') as held,
           count(*) filter (where d.state = 'dead') as dead,
           min(greatest(d.created_at, d.deliver_at))
               filter (where d.state = 'held' or (d.state = 'waiting' and not d.later)) as oldest
      from (select state, created_at, deliver_at, coalesce(deliver_at > now(), false) as later
              from outbox.delivery where sink = %(sink)s) d
 ) r
