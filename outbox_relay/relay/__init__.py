"""One sink's session: claim shards, read the log, deliver, settle."""
