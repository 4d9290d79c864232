"""A Kafka broker of the tests' own, and what can be asked of it."""

from tests.support.kafka.broker import KafkaBroker
from tests.support.kafka.records import Record

__all__ = ["KafkaBroker", "Record"]
