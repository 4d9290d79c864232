"""A sink for outbox-relay that publishes each event to a stream of NATS JetStream and waits for its acknowledgement."""

from nats_sink.sink import NatsSink

__all__ = ["NatsSink"]
