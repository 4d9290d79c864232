-- Create the partitions of recorded attempts for the coming days.
select outbox.make_attempt_partitions()
