-- Delete changes of events that are gone; how many.
select outbox_internal.trim_scheduled_changes(%(most)s::integer)
