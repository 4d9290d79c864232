-- Those of these names that schedules have.
select s.name from outbox.schedule s where s.name = any (%(names)s::text[])
