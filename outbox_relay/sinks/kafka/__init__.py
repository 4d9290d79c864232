"""The Kafka sink: events become records, and a delivery report makes an event delivered."""

from outbox_relay.sinks.kafka.delivery import KafkaSink, kafka_sink
from outbox_relay.sinks.kafka.records import RecordFormat
from outbox_relay.sinks.kafka.topics import TopicCreation

__all__ = ["KafkaSink", "RecordFormat", "TopicCreation", "kafka_sink"]
