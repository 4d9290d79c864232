"""Kafka brokers for tests, and their administration."""

from tests.support.kafka.broker import KafkaBroker
from tests.support.kafka.cluster import KafkaCluster
from tests.support.kafka.records import Record
from tests.support.kafka.topics import Administration

__all__ = ["Administration", "KafkaBroker", "KafkaCluster", "Record"]
