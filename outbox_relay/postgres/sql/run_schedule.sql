-- Emit the event of a schedule now.
select outbox.run_schedule(%(name)s, %(actor)s, %(reason)s) as uid
