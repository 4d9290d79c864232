-- Give a sink that no relay serves another name, and return the number of its rows.
select outbox.rename_sink(%(sink)s, %(new)s, %(actor)s, %(reason)s) as deliveries
