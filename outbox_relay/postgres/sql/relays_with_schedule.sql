-- The live relays that have a schedule in their settings.
select outbox.relays_with_schedule(%(name)s) as relays
