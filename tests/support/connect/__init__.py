"""A Kafka Connect worker with Debezium's connector, asked and told over its REST interface."""

from tests.support.connect.worker import ConnectWorker

__all__ = ["ConnectWorker"]
