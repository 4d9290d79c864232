-- Create the partitions of recorded attempts for the coming days.
select outbox_internal.make_partitions(parent => 'attempt')
