-- The live relays whose files decide keep_days.
select outbox_internal.keep_days_of() as relays
