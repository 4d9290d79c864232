-- The incarnation of the server, and those of these names that schedules have.
select outbox_internal.incarnation(), array(select s.name from outbox.schedule s where s.name = any (%(names)s::text[]))
