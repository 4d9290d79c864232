-- The payload and headers of an event with a row.
select d.payload, d.headers from outbox.delivery d where d.uid = %(uid)s::uuid order by d.id desc limit 1
