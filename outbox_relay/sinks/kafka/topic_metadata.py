"""What the brokers say of topics: whether they are there, and the largest batch they take. Everything here blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    ClusterMetadata,  # pyright: ignore[reportPrivateImportUsage] - documented here; the module lacks __all__
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)
from confluent_kafka.cimpl import NewTopic

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.sinks.kafka.certificate_errors import diagnosed
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings, error_of

CREATION_SECONDS = 1.0
"""How long a topic is waited for that is being created, by the broker because it was asked for, or by us."""
ASK_SECONDS = 0.25
"""First wait for the metadata of a cluster; each further one is twice as long."""
DESCRIBE_SECONDS = 1.0
"""Longest wait for the settings of topics: not every broker knows them, not every user may read them."""
AGE_SECONDS = 10.0
"""What is known of a topic's limit is read again, after this, before an event is refused for it."""
LISTED_SECONDS = 1.0
"""How long a list of the cluster's topics is used: events of many topics must not ask for one each."""
LEAST_BATCH_BYTES = 1_000
PRODUCERS = 4
"""Sizes of batches in use at once, at most: each needs a producer of its own."""
TOPICS = 4_096
"""Topics remembered at once, at most."""
PAUSE_SECONDS = 0.02

_NOT_YET = frozenset(("UNKNOWN_TOPIC_OR_PART", "LEADER_NOT_AVAILABLE"))


class ClusterUnavailable(Exception):
    """The cluster cannot take events now; the message says why."""


class TopicCreation(NamedTuple):
    """How the relay creates a topic that is missing."""

    partitions: int
    replication_factor: int


class _Known(NamedTuple):
    limit: int | None
    partitions: int
    read_at: float


class TopicMetadata:
    """What is known of the topics of one sink. ``creation`` is there if the relay may create them."""

    def __init__(self, settings: ClientSettings, log: ClientLog, creation: TopicCreation | None = None) -> None:
        self._settings = settings
        self._log = log
        self._creation = creation
        self._known: dict[str, _Known] = {}
        self._sizes: list[int] = []
        self._guessed: dict[str, int] = {}
        self._describes = True
        self._listed: tuple[float, frozenset[str]] = (-math.inf, frozenset())
        self.over: Callable[[], bool] = lambda: False
        """Whether who asks does not want to know any more."""

    @property
    def most(self) -> int:
        """The ``batch.size`` for a topic that sets no narrower limit, in bytes."""
        return self._settings.batch_bytes

    def size(self, topic: str) -> int:
        """The ``batch.size`` of the producer for ``topic``, which is known: no batch is then too large for it.

        There are at most ``PRODUCERS`` different ones; a topic shares one that is no less than half of what it takes.
        """
        limit = self._known[topic].limit
        # The broker measures a batch with its framing, a little of which librdkafka does not foresee.
        most = self._guessed.get(topic, self.most) if limit is None else limit - max(limit // 20, 512)
        wanted = max(min(most, self.most), LEAST_BATCH_BYTES)
        fitting = max((size for size in self._sizes if size <= wanted), default=0)
        if fitting * 2 > wanted or (fitting and len(self._sizes) >= PRODUCERS):
            return fitting
        if len(self._sizes) >= PRODUCERS:
            self._sizes.remove(min(self._sizes))
        self._sizes.append(wanted)
        return wanted

    def in_use(self, size: int) -> bool:
        """Whether a topic may be given a producer of this size."""
        return size in self._sizes

    def unknown(self, topics: Iterable[str]) -> list[str]:
        """Those of ``topics`` that were not asked about yet."""
        return [topic for topic in topics if topic not in self._known]

    def of(self, topic: str) -> int | None:
        """The largest batch that ``topic`` takes, in bytes; nothing when the brokers do not say."""
        return self._known[topic].limit

    def partitions(self, topic: str) -> int:
        """How many partitions ``topic`` has."""
        return self._known[topic].partitions

    def learn(self, topics: Sequence[str], seconds: float, *, patient: bool) -> Mapping[str, str]:
        """Ask about ``topics``, for at most ``seconds`` and a little; returns why some take no events.

        Asking lets a broker create a topic, where it does that by itself; ``patient`` is to wait for it. Raises
        :class:`ClusterUnavailable` when the cluster does not answer.
        """
        deadline = time.monotonic() + seconds
        admin = self._admin()
        refused: dict[str, str] = {}
        partitions = self._find(admin, topics, deadline, refused, patient=patient)
        limits = self._describe(admin, list(partitions), deadline)
        if len(self._known) + len(partitions) > TOPICS:
            self._known.clear()
        for topic, count in partitions.items():
            self._known[topic] = _Known(limits.get(topic), count, time.monotonic())
        return refused

    def existing(self, seconds: float) -> Collection[str]:
        """Return the names of all topics of the cluster, as of the last second. Creates none.

        Raises :class:`ClusterUnavailable` when the cluster does not answer.
        """
        now = time.monotonic()
        listed_at, names = self._listed
        if now - listed_at >= LISTED_SECONDS:
            admin = _admin(self._settings, self._log, create_topics=False)
            names = frozenset(_metadata(admin, self._log, None, now + seconds, self.over).topics)
            self._listed = (time.monotonic(), names)
        return names

    def refresh(self, topic: str, seconds: float) -> None:
        """Ask again about ``topic`` if what is known is old; keeps it if there is no answer."""
        known = self._known[topic]
        now = time.monotonic()
        if now - known.read_at < AGE_SECONDS:
            return
        self._known[topic] = known._replace(read_at=now)
        try:
            admin = self._admin()
            found = _metadata(admin, self._log, topic, now + seconds).topics[topic]
            limit = self._describe(admin, [topic], now + seconds).get(topic, known.limit)
        except (ClusterUnavailable, Misconfigured):
            return
        partitions = known.partitions if found.error else len(found.partitions)
        self._known[topic] = _Known(limit, partitions, now)

    def doubt(self, topic: str) -> None:
        """What is known of ``topic`` was wrong: it is asked about again."""
        self._known.pop(topic, None)

    def too_large(self, topic: str) -> None:
        """A batch was too large for ``topic``: ask for its limit again, or guess one if it cannot be known."""
        known = self._known.get(topic)
        if known is not None and known.limit is None:
            if len(self._guessed) >= TOPICS:
                self._guessed.clear()
            self._guessed[topic] = max(self.size(topic) // 2, LEAST_BATCH_BYTES)
        self.doubt(topic)

    def forget(self) -> None:
        """Ask about every topic again before its next event: much may change while a destination is down."""
        self._known.clear()
        self._sizes.clear()
        self._describes = True

    def _admin(self) -> AdminClient:
        return _admin(self._settings, self._log, create_topics=self._creation is None)

    def _find(
        self, admin: AdminClient, topics: Sequence[str], deadline: float, refused: dict[str, str], *, patient: bool
    ) -> dict[str, int]:
        """The number of partitions of each topic that is there; ``refused`` is filled with the reasons of others."""
        patience = min(deadline, time.monotonic() + CREATION_SECONDS) if patient else 0.0
        found: dict[str, int] = {}
        pending = list(topics)
        asked_to_create = False
        while True:
            missing: list[str] = []
            for topic in pending:
                told = _metadata(admin, self._log, topic, deadline, self.over).topics[topic]
                if told.error is None:
                    found[topic] = len(told.partitions)
                    refused.pop(topic, None)
                    continue
                refused[topic] = f"topic {topic}: {self._settings.describe(told.error)}"
                if told.error.name() in _NOT_YET:
                    missing.append(topic)
            pending = missing
            if pending and self._creation is not None and not asked_to_create:
                asked_to_create = True
                patience = min(deadline, time.monotonic() + CREATION_SECONDS)
                pending = self._create(admin, self._creation, pending, deadline, refused)
            if not pending or time.monotonic() >= patience:
                return found
            time.sleep(PAUSE_SECONDS)

    def _create(
        self, admin: AdminClient, how: TopicCreation, topics: list[str], deadline: float, refused: dict[str, str]
    ) -> list[str]:
        """Create ``topics``; returns those that are there now, or will be in a moment."""
        seconds = max(deadline - time.monotonic(), 0.1)
        wanted = [NewTopic(topic, how.partitions, how.replication_factor) for topic in topics]
        asked: dict[str, Future[None]] = cast("Any", admin).create_topics(wanted, request_timeout=seconds)
        created: list[str] = []
        for topic, done in asked.items():
            try:
                done.result(seconds + 1)
            except KafkaException as exception:
                error = error_of(exception)
                if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    refused[topic] = f"topic {topic}: cannot be created: {self._settings.describe(error)}"
                    continue
            except TimeoutError:
                refused[topic] = f"topic {topic}: cannot be created: no answer"
                continue
            created.append(topic)
        return created

    def _describe(self, admin: AdminClient, topics: Sequence[str], deadline: float) -> dict[str, int]:
        """The ``max.message.bytes`` of those topics where it can be read: batches of others stay as they are."""
        if not self._describes or not topics:
            return {}
        seconds = min(DESCRIBE_SECONDS, max(deadline - time.monotonic(), 0.1))
        found: dict[str, int] = {}
        for topic, asked in _ask(admin, ResourceType.TOPIC, topics, seconds).items():
            try:
                found[topic] = int(_values(asked, seconds)["max.message.bytes"])
            except KafkaException as exception:
                # A broker without this request never answers; metadata came, so it is not down.
                self._describes = error_of(exception).code() != KafkaError._TIMED_OUT
            except (KeyError, ValueError, TimeoutError):
                self._describes = False
            if not self._describes:
                break
        return found


def check(settings: ClientSettings, topic: str | None, seconds: float, *, creates: bool) -> str | None:
    """Why the cluster, or ``topic`` on it, would take no events now; nothing when it would. Creates no topic.

    ``creates`` says that the relay creates topics itself.
    """
    log = ClientLog(settings)
    deadline = time.monotonic() + seconds
    try:
        admin = _admin(settings, log, create_topics=False)
        found = _metadata(admin, log, topic, deadline)
    except (ClusterUnavailable, Misconfigured) as reason:
        return str(reason)
    error = found.topics[topic].error if topic is not None else None
    if error is None:
        return _too_large(settings, admin, found, topic, deadline)
    if error.name() in _NOT_YET and (creates or _creates_topics(admin, found, deadline)):
        return _too_large(settings, admin, found, None, deadline)
    return f"topic {topic}: {settings.describe(error)}"


def _too_large(
    settings: ClientSettings, admin: AdminClient, cluster: ClusterMetadata, topic: str | None, deadline: float
) -> str | None:
    """Why records as large as the user wants them would be refused; nothing where that cannot be known."""
    wanted = settings.record_bytes
    if wanted is None:
        return None
    limit, said = _largest(admin, cluster, topic, deadline)
    if limit is None or wanted <= limit:
        return None
    return (
        f'producer "message.max.bytes" is {wanted}, but {said}: '
        "raise that one, or lower this one; larger records would be refused"
    )


def refuses(settings: ClientSettings, topic: str | None, payload_bytes: int, seconds: float) -> str | None:
    """What is to be said where payloads may be as large as ``payload_bytes`` and records with them would be refused.

    Nothing where they would not be, or where nobody says what the cluster takes.
    """
    log = ClientLog(settings)
    deadline = time.monotonic() + seconds
    limits: list[tuple[int, str]] = []
    if settings.record_bytes is not None:
        limits.append((settings.record_bytes, f'the producer\'s "message.max.bytes" is {settings.record_bytes}'))
    try:
        admin = _admin(settings, log, create_topics=False)
        found = _metadata(admin, log, topic, deadline)
    except (ClusterUnavailable, Misconfigured):
        return None
    there = None if topic is None or found.topics[topic].error is not None else topic
    limit, said = _largest(admin, found, there, deadline)
    if limit is not None:
        limits.append((limit, f"{said}{', compressed' * settings.compresses}"))
    least, said = min(limits, default=(payload_bytes, ""))
    if payload_bytes <= least:
        return None
    return (
        f"events may have payloads of {payload_bytes} bytes (the ceiling of the database), but {said}: "
        "raise that limit, or lower the ceiling (migrate --max-payload-bytes); larger events would end dead"
    )


def _largest(
    admin: AdminClient, cluster: ClusterMetadata, topic: str | None, deadline: float
) -> tuple[int | None, str]:
    """The largest batch that ``topic`` takes, or without one the brokers, and how that is told; nothing if unknown."""
    if topic is None:
        told, name, what = _of_broker(admin, cluster, deadline), "message.max.bytes", "the brokers take"
    else:
        told, name, what = _of_topic(admin, topic, deadline), "max.message.bytes", f"topic {topic} takes"
    limit = told.get(name, "")
    return (int(limit) if limit.isdigit() else None), f"{what} at most {limit} bytes ({name})"


def _creates_topics(admin: AdminClient, cluster: ClusterMetadata, deadline: float) -> bool:
    """Whether the broker says that it creates a topic when a record comes for it."""
    return _of_broker(admin, cluster, deadline).get("auto.create.topics.enable") == "true"


def _of_broker(admin: AdminClient, cluster: ClusterMetadata, deadline: float) -> dict[str, str]:
    return _of(admin, ResourceType.BROKER, str(next(iter(cluster.brokers), 0)), deadline)


def _of_topic(admin: AdminClient, topic: str, deadline: float) -> dict[str, str]:
    return _of(admin, ResourceType.TOPIC, topic, deadline)


def _of(admin: AdminClient, of: ResourceType, name: str, deadline: float) -> dict[str, str]:
    """The settings of one broker or topic; none where they cannot be read."""
    seconds = max(deadline - time.monotonic(), 0.1)
    try:
        return _values(_ask(admin, of, [name], seconds)[name], seconds)
    except (KafkaException, TimeoutError):
        return {}


def _admin(settings: ClientSettings, log: ClientLog, *, create_topics: bool) -> AdminClient:
    # A client that waits for an answer connects again every few milliseconds: its log lines would flood.
    config: dict[str, Any] = {**settings.admin(create_topics=create_topics), **log.callbacks(), "log_level": 0}
    return AdminClient(config, logger=log)


def _metadata(
    admin: AdminClient, log: ClientLog, topic: str | None, deadline: float, over: Callable[[], bool] = lambda: False
) -> ClusterMetadata:
    """What the cluster says of ``topic``, or of all; asked again and again, each time for longer, until it is ``over``.

    Raises ``ClusterUnavailable``.
    """
    seconds = ASK_SECONDS
    while True:
        asked = time.monotonic()
        try:
            return admin.list_topics(topic, timeout=max(min(deadline - asked, seconds), 0.1))
        except KafkaException as exception:
            log.failed(error_of(exception))
            if time.monotonic() < asked + 0.8 * seconds or over():  # not because it waited in vain
                raise _not_ready(admin, log) from None
        seconds *= 2


def _not_ready(admin: AdminClient, log: ClientLog) -> ClusterUnavailable:
    reason = log.last_error
    # Serving the client's own errors, such as a refused password, may replace it by the cause.
    admin.poll(0)
    return ClusterUnavailable(diagnosed(log.last_error or reason or "", log.settings.authorities))


def _ask(
    admin: AdminClient, of: ResourceType, names: Sequence[str], seconds: float
) -> dict[str, Future[dict[str, Any]]]:
    """The settings of topics or brokers, each to come."""
    ask = cast("Any", admin).describe_configs
    asked: dict[Any, Future[dict[str, Any]]] = ask(
        [ConfigResource(of, name) for name in names], request_timeout=seconds
    )
    return {resource.name: found for resource, found in asked.items()}


def _values(asked: Future[dict[str, Any]], seconds: float) -> dict[str, str]:
    """What was asked for. Raises KafkaException or TimeoutError."""
    return {setting: str(entry.value) for setting, entry in asked.result(seconds + 1).items()}
