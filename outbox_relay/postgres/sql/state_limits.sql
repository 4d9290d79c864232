-- Record the limits that the file of a relay has for its sinks: those of the relay that was started or reloaded last are in
-- force on all relays. Sinks are locked in the order of their names, since several relays may start at a time.
with changed as materialized (
    select k.name, w.rate_per_second, w.max_in_flight_total, w.spread_seconds
      from outbox.sink k
      join jsonb_to_recordset(%(limits)s::jsonb)
           w (sink text, rate_per_second double precision, max_in_flight_total integer, spread_seconds double precision)
        on w.sink = k.name
     where outbox_internal.only_at(%(server)s::text)
       and (k.rate_per_second, k.max_in_flight_total, k.spread_seconds)
           is distinct from (w.rate_per_second, w.max_in_flight_total, w.spread_seconds)
     order by k.name
       for no key update of k
)
update outbox.sink k
   set rate_per_second = c.rate_per_second, max_in_flight_total = c.max_in_flight_total, spread_seconds = c.spread_seconds
  from changed c
 where k.name = c.name
