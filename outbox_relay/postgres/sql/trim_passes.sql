-- Remove passes that no event of the log can need; and exceptions of replays; how many were removed.
select outbox.trim_passes() + outbox.trim_replay_exceptions() as removed
