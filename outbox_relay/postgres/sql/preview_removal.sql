-- The rows and unsettled events that are lost with a sink, and the relays that have it in their settings.
select deliveries, undelivered, exact, relays
  from outbox.preview_removal(%(sink)s, %(most)s::integer, %(seconds)s::double precision, %(alive)s::double precision)
