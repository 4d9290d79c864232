-- True if the log or a row has the event.
select exists (select from outbox.event e where e.uid = %(uid)s::uuid)
    or exists (select from outbox.delivery d where d.uid = %(uid)s::uuid) as known
