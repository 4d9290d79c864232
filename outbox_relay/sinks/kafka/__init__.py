"""The Kafka sink: ordered per key and without loss, through an idempotent producer that is replaced when it fails."""

from outbox_relay.sinks.kafka.records import RecordFormat
from outbox_relay.sinks.kafka.sink import KafkaSink
from outbox_relay.sinks.kafka.topics import TopicCreation

__all__ = ["KafkaSink", "RecordFormat", "TopicCreation"]
