"""Partitions and batch limits of topics, and the creation of missing topics. All requests block."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings, error_of
from outbox_relay.sinks.kafka.cluster_queries import (
    MIN_SECONDS,
    NOT_YET,
    ClusterUnavailable,
    admin_client,
    cluster_metadata,
    config_values,
    create_topics,
    topic_configs,
)

CREATION_SECONDS = 1.0
"""Maximum wait for a topic that is being created, by the broker or by the sink."""
CONFIG_SECONDS = 1.0
"""Timeout of requests for the settings of topics. Not every broker knows them, not every user may read them."""
MAX_AGE_SECONDS = 10.0
"""Age from which metadata are read again before an event is refused because of them."""
LISTED_SECONDS = 1.0
"""Maximum age of the list of the cluster's topics, so that events of many topics share one request."""
MIN_BATCH_BYTES = 1_000
MAX_PRODUCERS = 4
"""Maximum number of batch sizes in use. Each needs its own producer."""
MAX_TOPICS = 4_096
"""Maximum number of topics remembered."""
PAUSE_SECONDS = 0.02


class TopicCreation(NamedTuple):
    """The settings of topics that the relay creates."""

    partitions: int
    replication_factor: int


class _Topic(NamedTuple):
    max_message_bytes: int | None
    partitions: int
    read_at: float


class TopicMetadata:
    """The known topics of one sink, and the batch sizes of their producers.

    Missing topics are created if ``creation`` is given.
    """

    def __init__(self, settings: ClientSettings, log: ClientLog, creation: TopicCreation | None = None) -> None:
        self._settings = settings
        self._log = log
        self._creation = creation
        self._known: dict[str, _Topic] = {}
        self._batch_sizes: list[int] = []
        self._guessed_sizes: dict[str, int] = {}
        self._reads_configs = True
        self._listed: tuple[float, frozenset[str]] = (-math.inf, frozenset())

    @property
    def max_batch_bytes(self) -> int:
        """Return the ``batch.size`` for a topic without a lower limit."""
        return self._settings.batch_bytes

    def batch_size(self, topic: str) -> int:
        """Return the ``batch.size`` of the producer for the known ``topic``, within its limit.

        There are at most ``MAX_PRODUCERS`` sizes. Topics share one if it is more than half of what they allow.
        """
        limit = self._known[topic].max_message_bytes
        # The broker counts the framing of a batch too, part of which librdkafka does not foresee.
        allowed = (
            self._guessed_sizes.get(topic, self.max_batch_bytes) if limit is None else limit - max(limit // 20, 512)
        )
        wanted = max(min(allowed, self.max_batch_bytes), MIN_BATCH_BYTES)
        shared = max((size for size in self._batch_sizes if size <= wanted), default=0)
        if shared * 2 > wanted or (shared and len(self._batch_sizes) >= MAX_PRODUCERS):
            return shared
        if len(self._batch_sizes) >= MAX_PRODUCERS:
            self._batch_sizes.remove(min(self._batch_sizes))
        self._batch_sizes.append(wanted)
        return wanted

    def in_use(self, batch_size: int) -> bool:
        """Return True if ``batch_size`` may be assigned to a topic."""
        return batch_size in self._batch_sizes

    def unknown(self, topics: Iterable[str]) -> list[str]:
        """Return those of ``topics`` that are not known."""
        return [topic for topic in topics if topic not in self._known]

    def max_message_bytes(self, topic: str) -> int | None:
        """Return the batch limit of the known ``topic``, or None if the brokers do not tell."""
        return self._known[topic].max_message_bytes

    def partitions(self, topic: str) -> int:
        """Return the number of partitions of the known ``topic``."""
        return self._known[topic].partitions

    def load(
        self, topics: Sequence[str], seconds: float, *, patient: bool, cancelled: Callable[[], bool] = lambda: False
    ) -> Mapping[str, str]:
        """Request metadata of ``topics`` and return the reasons for those that accept no events.

        The request may make a broker create a topic; with ``patient`` wait for that. Takes little longer than
        ``seconds``. Raise :class:`ClusterUnavailable` if the cluster does not answer.
        """
        deadline = time.monotonic() + seconds
        search = _TopicSearch(self._settings, self._log, self._admin(), self._creation, deadline, cancelled)
        search.run(topics, patient=patient)
        limits = self._read_limits(search.admin, list(search.partitions), deadline)
        if len(self._known) + len(search.partitions) > MAX_TOPICS:
            self._known.clear()
        for topic, count in search.partitions.items():
            self._known[topic] = _Topic(limits.get(topic), count, time.monotonic())
        return search.refused

    def existing(self, seconds: float, cancelled: Callable[[], bool]) -> Collection[str]:
        """Return the names of the cluster's topics, at most a second old. Creates none.

        Raise :class:`ClusterUnavailable` if the cluster does not answer.
        """
        now = time.monotonic()
        listed_at, names = self._listed
        if now - listed_at >= LISTED_SECONDS:
            admin = admin_client(self._settings, self._log, create_topics=False)
            names = frozenset(cluster_metadata(admin, self._log, None, now + seconds, cancelled).topics)
            self._listed = (time.monotonic(), names)
        return names

    def refresh(self, topic: str, seconds: float) -> None:
        """Read the metadata of ``topic`` again if they are old. Keep them if there is no answer."""
        known = self._known[topic]
        now = time.monotonic()
        if now - known.read_at < MAX_AGE_SECONDS:
            return
        self._known[topic] = known._replace(read_at=now)
        try:
            admin = self._admin()
            found = cluster_metadata(admin, self._log, topic, now + seconds).topics[topic]
            limit = self._read_limits(admin, [topic], now + seconds).get(topic, known.max_message_bytes)
        except (ClusterUnavailable, ConfigurationError):
            return
        partitions = known.partitions if found.error else len(found.partitions)
        self._known[topic] = _Topic(limit, partitions, now)

    def invalidate(self, topic: str) -> None:
        """Discard the metadata of ``topic``."""
        self._known.pop(topic, None)

    def reduce_batch_size(self, topic: str) -> None:
        """Discard the limit of ``topic``, which a batch exceeded, or halve the guessed size if it is unknown."""
        known = self._known.get(topic)
        if known is not None and known.max_message_bytes is None:
            if len(self._guessed_sizes) >= MAX_TOPICS:
                self._guessed_sizes.clear()
            self._guessed_sizes[topic] = max(self.batch_size(topic) // 2, MIN_BATCH_BYTES)
        self.invalidate(topic)

    def clear(self) -> None:
        """Discard all metadata: much may change while a destination is down."""
        self._known.clear()
        self._batch_sizes.clear()
        self._reads_configs = True

    def _admin(self) -> AdminClient:
        return admin_client(self._settings, self._log, create_topics=self._creation is None)

    def _read_limits(self, admin: AdminClient, topics: Sequence[str], deadline: float) -> dict[str, int]:
        """Return the readable ``max.message.bytes`` of ``topics``."""
        if not self._reads_configs or not topics:
            return {}
        seconds = min(CONFIG_SECONDS, max(deadline - time.monotonic(), MIN_SECONDS))
        found: dict[str, int] = {}
        for topic, asked in topic_configs(admin, topics, seconds).items():
            try:
                found[topic] = int(config_values(asked, seconds)["max.message.bytes"])
            except KafkaException as exception:
                # A broker without this request never answers. It is not down, since it returned metadata.
                self._reads_configs = error_of(exception).code() != KafkaError._TIMED_OUT
            except (KeyError, ValueError, TimeoutError):
                self._reads_configs = False
            if not self._reads_configs:
                break
        return found


class _TopicSearch:
    """Finds topics, and creates or waits for missing ones."""

    def __init__(
        self,
        settings: ClientSettings,
        log: ClientLog,
        admin: AdminClient,
        creation: TopicCreation | None,
        deadline: float,
        cancelled: Callable[[], bool],
    ) -> None:
        self.admin = admin
        self.partitions: dict[str, int] = {}
        """The number of partitions of each topic found."""
        self.refused: dict[str, str] = {}
        """The reasons for the other topics."""
        self._settings = settings
        self._log = log
        self._creation = creation
        self._deadline = deadline
        self._cancelled = cancelled

    def run(self, topics: Sequence[str], *, patient: bool) -> None:
        """Search for ``topics``; with ``patient`` wait for missing ones. Raise ``ClusterUnavailable``."""
        creation = self._creation
        wait_until = self._wait_end() if patient else 0.0
        missing = self._look_up(topics)
        if missing and creation is not None:
            wait_until = self._wait_end()
            missing = self._create(creation, missing)
        while missing and time.monotonic() < wait_until:
            time.sleep(PAUSE_SECONDS)
            missing = self._look_up(missing)

    def _wait_end(self) -> float:
        return min(self._deadline, time.monotonic() + CREATION_SECONDS)

    def _look_up(self, topics: Sequence[str]) -> list[str]:
        """Request metadata of ``topics`` and return those that are missing."""
        missing: list[str] = []
        for topic in topics:
            found = cluster_metadata(self.admin, self._log, topic, self._deadline, self._cancelled).topics[topic]
            if found.error is None:
                self.partitions[topic] = len(found.partitions)
                self.refused.pop(topic, None)
                continue
            self.refused[topic] = f"topic {topic}: {self._settings.describe(found.error)}"
            if found.error.name() in NOT_YET:
                missing.append(topic)
        return missing

    def _create(self, creation: TopicCreation, topics: Sequence[str]) -> list[str]:
        """Create ``topics`` and return those that exist now or soon."""
        seconds = max(self._deadline - time.monotonic(), MIN_SECONDS)
        wanted = [NewTopic(topic, creation.partitions, creation.replication_factor) for topic in topics]
        errors = create_topics(self.admin, wanted, seconds)
        for topic, error in errors.items():
            if error is None:
                self.refused[topic] = f"topic {topic}: cannot be created: no answer"
            elif error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                self.refused[topic] = f"topic {topic}: cannot be created: {self._settings.describe(error)}"
        return [topic for topic in topics if topic not in errors or _exists(errors[topic])]


def _exists(error: KafkaError | None) -> bool:
    return error is not None and error.code() == KafkaError.TOPIC_ALREADY_EXISTS
