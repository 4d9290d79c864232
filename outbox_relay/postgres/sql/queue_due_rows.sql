-- Put rows whose time has come into the queues of their sinks; how many of them.
select outbox.queue_due_rows(%(most)s::integer)
