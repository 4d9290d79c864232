-- The live relays whose files decide keep_days.
select outbox.keep_days_of() as relays
