-- All sinks of the database, and the number of their shards without an owner. An error that is over has only its times.
select k.name, k.patterns, k.claim, k.paused, k.paused_reason, k.circuit, k.in_flight_limit,
       case when n.mended_at is null then k.last_error end as last_error,
       case when n.mended_at is not null then k.last_error end as mended_error,
       case when k.last_error is not null then k.last_error_at end as last_error_at, n.mended_at as last_error_mended_at,
       extract(epoch from clock_timestamp() - k.last_error_at)::double precision as error_seconds,
       extract(epoch from clock_timestamp() - n.mended_at)::double precision as mended_seconds,
       extract(epoch from clock_timestamp() - k.circuit_since)::double precision as circuit_seconds,
       64 - (select count(*) from outbox.owned o where o.sink = k.name)::integer as unowned,
       k.rate_per_second, k.max_in_flight_total, k.spread_seconds
  from outbox.sink k
 cross join lateral (
    select case when k.last_error is not null and k.last_error_mended_at >= k.last_error_at and k.circuit = 'closed'
                then k.last_error_mended_at end as mended_at
 ) n
 order by k.name
