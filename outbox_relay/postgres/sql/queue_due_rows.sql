-- Put rows whose time has come into the queues of their sinks; how many of them.
select outbox_internal.queue_due_rows(%(most)s::integer)
