-- True if there is a schedule.
select exists (select from outbox.schedule) as found
