"""The Kafka sink: in order per key, nothing lost, through one idempotent producer at a time."""

from outbox_relay.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
