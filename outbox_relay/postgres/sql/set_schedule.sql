-- Pause, resume or remove a schedule.
select outbox.set_schedule(%(name)s, %(action)s, %(actor)s, %(reason)s) as changed
