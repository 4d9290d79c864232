-- Remove passes that no event of the log can need; and exceptions of replays; how many were removed.
select outbox_internal.trim_passes() + outbox_internal.trim_replay_exceptions() as removed
