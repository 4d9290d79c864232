-- Put a sink at another place of the log.
select again, passed_over, exact from outbox.seek_sink(%(sink)s, %(to)s, %(actor)s, %(reason)s)
