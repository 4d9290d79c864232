-- The unsettled events of a sink with claim = "rows", as status_backlog.sql finds those of others. Of the rows in each state,
-- only as many are counted as the schema bounds.
select b.events + r.waiting + r.held as backlog, b.exact and not r.more as exact, r.waiting, r.held, r.dead,
       s.scheduled,
       greatest(0, coalesce(extract(epoch from now() - outbox_internal.loadable_time(b.oldest)), 0), coalesce(r.oldest, 0))
           ::double precision as oldest_seconds
  from outbox_internal.backlog(%(sink)s::text, %(types)s::text[], %(most)s::integer, %(seconds)s::double precision) b
 cross join (
    select coalesce(sum(f.rows) filter (where f.state = 'waiting'), 0)::bigint as waiting,
           coalesce(sum(f.rows) filter (where f.state = 'held'), 0)::bigint as held,
           coalesce(sum(f.rows) filter (where f.state = 'dead'), 0)::bigint as dead,
           coalesce(bool_or(f.rows >= 100000), false) as more,
           max(f.oldest) filter (where f.state in ('waiting', 'held')) as oldest
      from outbox_internal.figures_of_rows(%(sink)s::text, 100000) f
 ) r
 cross join (
    select count(*) as scheduled
      from (select from outbox.scheduled e
             where %(types)s::text[] is null or e.type like any (%(types)s::text[])
             limit 1000000) l
 ) s
