-- The days that are past keep_days and hold events.
select day from outbox_internal.due_days()
