-- The unsettled events of one sink: its rows of `delivery` by state, and the remaining events of the log; and the number of
-- scheduled events that it takes, up to a million.
select b.events + r.waiting + r.held as backlog, b.exact, r.waiting, r.held, r.dead, s.scheduled,
       greatest(0, coalesce(extract(epoch from now() - outbox_internal.loadable_time(least(b.oldest, r.oldest))), 0))::double precision
           as oldest_seconds
  from outbox_internal.backlog(%(sink)s::text, %(types)s::text[], %(most)s::integer, %(seconds)s::double precision) b
 cross join (
    select count(*) filter (where d.state = 'waiting') as waiting,
           count(*) filter (where d.state = 'held') as held,
           count(*) filter (where d.state = 'dead') as dead,
           min(greatest(d.created_at, d.deliver_at)) filter (where d.state <> 'dead') as oldest
      from outbox.delivery d where d.sink = %(sink)s
 ) r
 cross join (
    select count(*) as scheduled
      from (select from outbox.scheduled e
             where %(types)s::text[] is null or e.type like any (%(types)s::text[])
             limit 1000000) l
 ) s
