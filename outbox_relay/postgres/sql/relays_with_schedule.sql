-- The live relays that have a schedule in their settings.
select outbox_internal.relays_with_schedule(%(name)s) as relays
