-- Have relays whose circuit of a sink is open probe now; null, or the reason why there is nothing to probe.
select outbox.probe_sink(%(sink)s::text, %(actor)s::text, %(reason)s::text) as obstacle
