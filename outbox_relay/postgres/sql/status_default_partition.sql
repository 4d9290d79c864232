-- The number of events in the DEFAULT partition, up to a limit.
select count(*)::integer as events from (select from outbox.event_default limit %(most)s::integer) d
