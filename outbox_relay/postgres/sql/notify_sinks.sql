-- Make notices of sinks that lag, or no longer do; how far each lags, and whether it is paused.
select n.sink, n.seconds, n.paused from outbox_internal.notify_sinks(%(lagging)s::double precision) n
