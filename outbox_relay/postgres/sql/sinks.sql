-- The state of the sinks and replays of this relay, and the number of their shards that other relays own. A replay is paused
-- with its target, is asked for probes with it, and has the target's generation.
with owned as materialized (
    select o.sink, count(*) as shards from outbox.owned o
     where o.sink = any (%(sinks)s::text[]) and o.owner is distinct from %(relay)s::uuid
     group by o.sink
)
select k.name, k.generation, k.paused, k.circuit, k.in_flight_limit, coalesce(o.shards, 0) as owned,
       k.patterns,
       coalesce(k.last_error not like 'client: %%' and (k.last_error_mended_at < k.last_error_at) is not false, false)
           as last_error_open,
       k.probes, k.claim, k.rate_per_second, k.max_in_flight_total, k.spread_seconds, k.start
  from outbox.sink k
  left join owned o on o.sink = k.name
 where k.name = any (%(sinks)s::text[])
union all
select '~' || r.id, k.generation, k.paused or r.state <> 'running', 'closed', null, coalesce(o.shards, 0) as owned,
       k.patterns, false, k.probes, 'log', null, null, null, null
  from outbox.replay r
  join outbox.sink k on k.name = r.target
  left join owned o on o.sink = '~' || r.id
 where not r.cleared and '~' || r.id = any (%(sinks)s::text[])
