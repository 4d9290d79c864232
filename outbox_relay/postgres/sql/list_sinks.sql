-- All sinks, for people, with the relays that have them in their settings.
select name, patterns, generation, start, since, paused, paused_reason, relays
  from outbox.list_sinks(%(seconds)s::double precision)
