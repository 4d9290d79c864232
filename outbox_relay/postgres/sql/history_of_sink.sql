-- The history of one sink, or of the process with '', in steps of `step` seconds, oldest first. `age` counts the steps back
-- from the present one.
with bounds as materialized (
    select date_bin(%(step)s::double precision * interval '1 second', clock_timestamp(), 'epoch') as newest
)
select (extract(epoch from b.newest - date_bin(%(step)s::double precision * interval '1 second', h.at, 'epoch'))
           / %(step)s::double precision)::integer as age,
       sum(h.delivered)::bigint as delivered, sum(h.failed)::bigint as failed, sum(h.dead)::bigint as dead,
       max(h.backlog)::bigint as backlog, max(h.oldest_seconds) as oldest, max(h.end_to_end_p50) as p50,
       max(h.end_to_end_p99) as p99, max(h.claim_p99) as claim_p99, max(h.tick_p99) as tick_p99,
       max(h.settle_p99) as settle_p99, sum(h.busy_ms) as busy_ms
  from outbox.history h, bounds b
 where h.sink = %(sink)s
   and h.at > b.newest - %(steps)s::integer * %(step)s::double precision * interval '1 second'
 group by 1
 order by 1 desc
