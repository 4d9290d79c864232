-- Events for whose day no partition had been made; counted up to a limit.
select count(*)::integer as events from (select from outbox.event_default limit %(most)s::integer) d
