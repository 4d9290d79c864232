-- All sinks of the database, and the number of their shards without an owner. An error that is over has only its times.
-- `at_limit` names the limits across all relays that requests have waited for in the last five seconds.
select k.name, k.patterns, k.claim, k.paused, k.paused_reason, k.circuit, k.in_flight_limit,
       case when n.mended_at is null then k.last_error end as last_error,
       case when k.last_error is not null then k.last_error_at end as last_error_at, n.mended_at as last_error_mended_at,
       extract(epoch from clock_timestamp() - k.last_error_at)::double precision as error_seconds,
       extract(epoch from clock_timestamp() - n.mended_at)::double precision as mended_seconds,
       extract(epoch from clock_timestamp() - k.circuit_since)::double precision as circuit_seconds,
       64 - (select count(*) from outbox.shard s
              where (s.sink || '') = k.name and s.owner is not null and s.lease_until > now())::integer as unowned,
       k.rate_per_second, k.max_in_flight_total, k.spread_seconds,
       array_remove(array[
            case when k.rate_per_second is not null
                      and (select l.short_at from outbox.sink_limit l where l.sink = k.name) > now() - interval '5 seconds'
                 then 'rate_per_second' end,
            case when k.max_in_flight_total
                      < (select sum(s.wanted) from outbox.sink_slot s
                          where s.sink = k.name and s.asked_at > now() - interval '5 seconds')
                 then 'max_in_flight_total' end], null) as at_limit
  from outbox.sink k
 cross join lateral (
    select case when k.last_error is not null and k.last_error_mended_at >= k.last_error_at and k.circuit = 'closed'
                then k.last_error_mended_at end as mended_at
 ) n
 order by k.name
