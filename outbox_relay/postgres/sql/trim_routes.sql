-- Complete the routes of each sink, and remove those that no event of the log can need; and exceptions of replays; how many were
-- removed.
select outbox_internal.trim_routes() as removed
