-- The state of the sinks of this relay, and the number of their shards without an owner.
select k.name, k.generation, k.paused, k.circuit, k.in_flight_limit,
       (select count(*) from outbox.shard s
         where s.sink = k.name and s.lease_until <= clock_timestamp())::integer as unowned,
       k.patterns
  from outbox.sink k
 where k.name = any (%(sinks)s::text[])
