-- Carry out changes of scheduled events on their rows; how many were looked at.
select outbox_internal.apply_scheduled_changes(%(most)s::integer)
