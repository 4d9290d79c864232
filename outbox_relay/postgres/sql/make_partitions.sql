-- Partitions of the log, made ahead.
select outbox.make_partitions()
