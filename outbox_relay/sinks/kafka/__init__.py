"""The Kafka sink: ordered per key and without loss, through idempotent producers that are replaced when they fail."""

from outbox_relay.sinks.kafka.client import ClientSettings
from outbox_relay.sinks.kafka.records import RecordFormat
from outbox_relay.sinks.kafka.sink import KafkaSink
from outbox_relay.sinks.kafka.topic_metadata import TopicCreation

__all__ = ["ClientSettings", "KafkaSink", "RecordFormat", "TopicCreation"]
