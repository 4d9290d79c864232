-- Medians of the minutes of the history: of the recent ones, and of those before. Percentiles are of each sink, and '' is
-- the process; the work of statements and the deliveries are sums of all sinks. The present minute is not complete.
with bounds as materialized (
    select date_trunc('minute', clock_timestamp()) as until,
           date_trunc('minute', clock_timestamp()) - %(seconds)s::double precision * interval '1 second' as recent
),
minutes as (
    select h.sink, h.at, h.at >= b.recent as recent, h.claim_p99, h.tick_p99, h.settle_p99, h.busy_ms, h.delivered
      from outbox.history h, bounds b
     where h.at >= b.until - interval '2 days' and h.at < b.until
),
totals as (
    select m.at, m.recent, coalesce(sum(m.busy_ms), 0) as busy, sum(m.delivered)::double precision as rate
      from minutes m group by m.at, m.recent
),
medians as (
    select m.sink, v.*
      from (
        select s.sink,
               count(s.claim_p99) filter (where s.recent) as claim_recents,
               count(s.claim_p99) filter (where not s.recent) as claim_earliers,
               percentile_disc(0.5) within group (order by s.claim_p99) filter (where s.recent) as claim_recent,
               percentile_disc(0.5) within group (order by s.claim_p99) filter (where not s.recent) as claim_earlier,
               count(s.settle_p99) filter (where s.recent) as settle_recents,
               count(s.settle_p99) filter (where not s.recent) as settle_earliers,
               percentile_disc(0.5) within group (order by s.settle_p99) filter (where s.recent) as settle_recent,
               percentile_disc(0.5) within group (order by s.settle_p99) filter (where not s.recent) as settle_earlier,
               count(s.tick_p99) filter (where s.recent) as tick_recents,
               count(s.tick_p99) filter (where not s.recent) as tick_earliers,
               percentile_disc(0.5) within group (order by s.tick_p99) filter (where s.recent) as tick_recent,
               percentile_disc(0.5) within group (order by s.tick_p99) filter (where not s.recent) as tick_earlier
          from minutes s group by s.sink
      ) m
     cross join lateral (values
        ('claim', m.claim_recents, m.claim_earliers, m.claim_recent, m.claim_earlier),
        ('settle', m.settle_recents, m.settle_earliers, m.settle_recent, m.settle_earlier),
        ('tick', m.tick_recents, m.tick_earliers, m.tick_recent, m.tick_earlier)
     ) v (measure, recents, earliers, recent, earlier)
    union all
    select '', v.*
      from (
        select count(*) filter (where t.recent) as recents, count(*) filter (where not t.recent) as earliers,
               percentile_disc(0.5) within group (order by t.busy) filter (where t.recent) as busy_recent,
               percentile_disc(0.5) within group (order by t.busy) filter (where not t.recent) as busy_earlier,
               percentile_disc(0.5) within group (order by t.rate) filter (where t.recent) as rate_recent,
               percentile_disc(0.5) within group (order by t.rate) filter (where not t.recent) as rate_earlier
          from totals t
      ) m
     cross join lateral (values
        ('busy', m.recents, m.earliers, m.busy_recent, m.busy_earlier),
        ('rate', m.recents, m.earliers, m.rate_recent, m.rate_earlier)
     ) v (measure, recents, earliers, recent, earlier)
)
select n.sink, n.measure, n.recents::integer as recent_minutes, n.earliers::integer as earlier_minutes, n.recent, n.earlier
  from medians n
 where n.recents > 0
 order by n.sink, n.measure
 limit 10000
