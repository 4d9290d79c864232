"""The Kafka sink: in order per key, nothing lost, through idempotent producers that are replaced when they fail."""

from outbox_relay.sinks.kafka.client import ClientSettings
from outbox_relay.sinks.kafka.limits import Creation
from outbox_relay.sinks.kafka.records import Form
from outbox_relay.sinks.kafka.sink import KafkaSink
from outbox_relay.sinks.kafka.statistics import Statistics

__all__ = ["ClientSettings", "Creation", "Form", "KafkaSink", "Statistics"]
