-- Record the limits that the file of a relay has for its sinks: those of the relay that was started or reloaded last are in
-- force on all relays.
update outbox.sink k
   set rate_per_second = w.rate_per_second, max_in_flight_total = w.max_in_flight_total, spread_seconds = w.spread_seconds
  from jsonb_to_recordset(%(limits)s::jsonb)
       w (sink text, rate_per_second double precision, max_in_flight_total integer, spread_seconds double precision)
 where k.name = w.sink
   and outbox_internal.only_at(%(server)s::text)
   and (k.rate_per_second, k.max_in_flight_total, k.spread_seconds)
       is distinct from (w.rate_per_second, w.max_in_flight_total, w.spread_seconds)
