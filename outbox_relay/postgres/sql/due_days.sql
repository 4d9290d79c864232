-- The days that are past keep_days and hold events.
select d.day::text as day from outbox_internal.past_days() d
