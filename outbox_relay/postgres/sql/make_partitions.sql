-- Create the partitions of the log for the coming days.
select outbox_internal.make_partitions()
