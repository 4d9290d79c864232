-- Medians of the minutes of the history: of the recent ones, and of those before. Percentiles are of each sink, and '' is
-- the process; the work of statements and the deliveries are sums of all sinks. The present minute is not complete.
with minutes as materialized (
    select h.sink, h.at, h.claim_p99, h.tick_p99, h.settle_p99, h.busy_ms, h.delivered
      from outbox.history h
     where h.at >= date_trunc('minute', clock_timestamp()) - interval '2 days'
       and h.at < date_trunc('minute', clock_timestamp())
),
measured as (
    select m.sink, m.at, v.measure, v.value
      from minutes m
     cross join lateral (values ('claim', m.claim_p99), ('settle', m.settle_p99), ('tick', m.tick_p99)) v (measure, value)
     where v.value is not null
    union all
    select '', t.at, v.measure, v.value
      from (select m.at, coalesce(sum(m.busy_ms), 0) as busy, sum(m.delivered) as rate from minutes m group by m.at) t
     cross join lateral (values ('busy', t.busy), ('rate', t.rate::double precision)) v (measure, value)
),
split as (
    select d.*, d.at >= date_trunc('minute', clock_timestamp()) - %(seconds)s::double precision * interval '1 second' as recent
      from measured d
)
select s.sink, s.measure,
       (count(*) filter (where s.recent))::integer as recent_minutes,
       (count(*) filter (where not s.recent))::integer as earlier_minutes,
       percentile_disc(0.5) within group (order by s.value) filter (where s.recent) as recent,
       percentile_disc(0.5) within group (order by s.value) filter (where not s.recent) as earlier
  from split s
 group by s.sink, s.measure
having count(*) filter (where s.recent) > 0
 order by s.sink, s.measure
 limit 10000
