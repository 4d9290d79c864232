-- All sinks of the database, and the number of their shards without an owner.
select k.name, k.patterns, k.paused, k.paused_reason, k.circuit, k.in_flight_limit, k.last_error,
       extract(epoch from clock_timestamp() - k.circuit_since)::double precision as circuit_seconds,
       (select count(*) from outbox.shard s
         where s.sink = k.name and (s.owner is null or s.lease_until <= now()))::integer as unowned
  from outbox.sink k
 order by k.name
