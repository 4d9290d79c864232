"""Three brokers that replicate to each other."""

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException

from outbox_relay.workbench.embedded import ports
from tests.support.kafka import records
from tests.support.kafka.broker import QUICK_START, KafkaBroker
from tests.support.kafka.records import Record
from tests.support.kafka.topics import Administration
from tests.support.wait import until

NODES = 3
PARTITIONS = 6
IN_SYNC_SECONDS = 90


class KafkaCluster:
    """Three nodes of Apache Kafka, each broker and controller, with three replicas of every topic and two in sync.

    As a context manager it is created, started, and removed at the end. Needs Java: there is no substitute.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.nodes = [KafkaBroker(java=QUICK_START) for _ in range(NODES)]
        voters = ",".join(
            f"{number}@{ports.LOOPBACK}:{node.controller_port}" for number, node in enumerate(self.nodes, 1)
        )
        for number, node in enumerate(self.nodes, 1):
            own = {
                "node.id": str(number),
                "controller.quorum.voters": voters,
                "default.replication.factor": str(NODES),
                "min.insync.replicas": "2",
                "replica.lag.time.max.ms": "5000",
                "broker.heartbeat.interval.ms": "500",
                "offsets.topic.num.partitions": "1",
            }
            node.add_settings({**own, **(settings or {})}, "controller.quorum.bootstrap.servers")

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor(NODES) as pool:
                list(pool.map(KafkaBroker.__enter__, self.nodes))
            until(lambda: self._brokers() == NODES, seconds=IN_SYNC_SECONDS, what="all brokers know each other")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all nodes and remove their directories."""
        for node in self.nodes:
            node.close()

    @property
    def bootstrap(self) -> str:
        """Return the addresses of all nodes, for `bootstrap.servers`."""
        return ",".join(node.bootstrap for node in self.nodes)

    @property
    def administration(self) -> Administration:
        """Return a new admin client."""
        return Administration(self.bootstrap)

    def create_topic(self, name: str, partitions: int = PARTITIONS) -> None:
        """Create a topic with a replica on each node, and wait until all are in sync."""
        self.administration.create_topic(name, partitions, NODES)
        self.in_sync(name)

    def read_all(self, topic: str, *, seconds: float = 60) -> list[Record]:
        """See :func:`tests.support.kafka.records.read_all`."""
        return records.read_all(self.bootstrap, topic, seconds=seconds)

    def leader(self, topic: str, partition: int = 0) -> KafkaBroker:
        """Return the leader of a partition."""
        client = self.administration.client

        def found() -> int:
            return max(client.list_topics(topic, timeout=10).topics[topic].partitions[partition].leader, 0)

        return self.nodes[until(found, seconds=IN_SYNC_SECONDS, what=f"partition {partition} has a leader") - 1]

    def in_sync(self, topic: str, copies: int = NODES) -> None:
        """Wait until every partition has `copies` replicas in sync."""
        client = self.administration.client

        def fact() -> bool:
            try:
                found = client.list_topics(topic, timeout=5).topics[topic].partitions.values()
            except KafkaException:
                return False
            return bool(found) and all(len(partition.isrs) == copies for partition in found)

        until(fact, seconds=IN_SYNC_SECONDS, what=f"{copies} replicas of {topic} are in sync")

    def restart_each(self, topic: str) -> None:
        """Restart one node after another, each when all replicas of `topic` are in sync."""
        for node in self.nodes:
            node.restart()
            self.in_sync(topic)

    def _brokers(self) -> int:
        with contextlib.suppress(KafkaException):
            return len(self.administration.client.list_topics(timeout=5).brokers)
        return 0
