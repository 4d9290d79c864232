-- True if the log or a row has the event.
select outbox_internal.event_id(%(uid)s::uuid) is not null
    or exists (select from outbox.delivery d where d.uid = %(uid)s::uuid) as known
