-- The state of every sink.
select s.sink, s.patterns, s.paused, s.unowned, s.position_lag from outbox_internal.figures_of_sinks() s
