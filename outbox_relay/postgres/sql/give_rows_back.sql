-- Rows whose delivery ended without an outcome, by a relay that goes on: no claim is counted against them.
select outbox.give_rows_back(%(sink)s::text, %(owner)s::uuid)
