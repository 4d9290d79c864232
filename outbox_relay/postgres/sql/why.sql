-- An event and its state in each sink.
select outbox.why(%(uid)s::uuid) as found
