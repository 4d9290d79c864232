-- Create the partitions of the log for the coming days.
select outbox.make_partitions()
