-- The last hour of each sink: sums, percentiles, and the deliveries of each minute with its age, oldest first. Percentiles
-- of an hour are not known: `p50` is the median of those of its minutes, `p99` the largest.
select h.sink, sum(h.delivered)::bigint as delivered, sum(h.failed)::bigint as failed, sum(h.dead)::bigint as dead,
       percentile_disc(0.5) within group (order by h.end_to_end_p50) as p50, max(h.end_to_end_p99) as p99,
       array_agg((extract(epoch from date_trunc('minute', now()) - h.at) / 60)::integer order by h.at) as ages,
       array_agg(h.delivered order by h.at) as deliveries
  from outbox.history h
 where h.at > date_trunc('minute', now()) - interval '1 hour' and h.sink <> ''
 group by h.sink
 limit 1000
