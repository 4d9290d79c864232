"""What the brokers say of topics: whether they are there, and the largest batch they take. Everything here blocks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    ClusterMetadata,  # pyright: ignore[reportPrivateImportUsage] - documented here; the module lacks __all__
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings, error_of

CREATION_SECONDS = 1.0
"""How long a topic is waited for that the broker may be creating because it was asked for."""
DESCRIBE_SECONDS = 1.0
"""Longest wait for a topic's settings: not every broker knows them, not every user may read them."""
AGE_SECONDS = 10.0
"""What is known of a topic's limit is read again, after this, before an event is refused for it."""
LEAST_BATCH_BYTES = 1_000
PAUSE_SECONDS = 0.02

_NOT_YET = frozenset(("UNKNOWN_TOPIC_OR_PART", "LEADER_NOT_AVAILABLE"))


class NotReady(Exception):
    """A topic cannot take events now; the message names it and says why."""


class Limits:
    """What is known of the topics of one sink."""

    def __init__(self, settings: ClientSettings, log: ClientLog) -> None:
        self._settings = settings
        self._log = log
        self._batch_bytes = settings.batch_bytes
        self._known: dict[str, tuple[int | None, float]] = {}
        self._describes = True

    @property
    def batch_bytes(self) -> int:
        """A ``batch.size`` that no topic seen so far refuses; only ever shrinks."""
        return self._batch_bytes

    def unknown(self, topics: Iterable[str]) -> list[str]:
        """Those of ``topics`` that were not asked about yet."""
        return [topic for topic in topics if topic not in self._known]

    def of(self, topic: str) -> int | None:
        """The largest batch that ``topic`` takes, in bytes; nothing when the brokers do not say."""
        return self._known[topic][0]

    def learn(self, topics: Iterable[str], seconds: float) -> None:
        """Ask about ``topics``, for at most ``seconds`` and a little. Raises :class:`NotReady`.

        Asking lets a broker create a topic, where it does that by itself.
        """
        deadline = time.monotonic() + seconds
        admin = _admin(self._settings, self._log, create_topics=True)
        for topic in topics:
            self._find(admin, topic, deadline)
            limit = self._describe(admin, topic, deadline)
            self._known[topic] = limit, time.monotonic()
            if limit is not None:
                # The broker measures a batch with its framing, a little of which librdkafka does not foresee.
                room = max(limit // 20, 512)
                self._shrink_to(limit - room)

    def refresh(self, topic: str, seconds: float) -> None:
        """Ask again about ``topic`` if what is known is old; keeps it if there is no answer."""
        limit, read_at = self._known[topic]
        if time.monotonic() - read_at < AGE_SECONDS:
            return
        found = self._describe(
            _admin(self._settings, self._log, create_topics=False), topic, time.monotonic() + seconds
        )
        self._known[topic] = found or limit, time.monotonic()

    def doubt(self, topic: str | None) -> None:
        """A request was too large for ``topic``: ask for its limit again, or guess one if it cannot be known."""
        if topic is not None and self._known.pop(topic, (None, 0.0))[0] is None:
            self._shrink_to(self._batch_bytes // 2)

    def forget(self) -> None:
        """Ask about every topic again before its next event: much may change while a destination is down."""
        self._known.clear()
        self._describes = True

    def _shrink_to(self, size: int) -> None:
        self._batch_bytes = min(self._batch_bytes, max(size, LEAST_BATCH_BYTES))

    def _find(self, admin: AdminClient, topic: str, deadline: float) -> None:
        """Return once ``topic`` is there. Raises :class:`NotReady`."""
        patience = min(deadline, time.monotonic() + CREATION_SECONDS)
        while error := _metadata(admin, self._log, topic, deadline).topics[topic].error:
            if error.name() not in _NOT_YET or time.monotonic() >= patience:
                raise NotReady(f"topic {topic}: {self._settings.describe(error)}")
            time.sleep(PAUSE_SECONDS)

    def _describe(self, admin: AdminClient, topic: str, deadline: float) -> int | None:
        """The topic's ``max.message.bytes``, or nothing when it cannot be read: then batches stay as they are."""
        if not self._describes:
            return None
        seconds = min(DESCRIBE_SECONDS, max(deadline - time.monotonic(), 0.1))
        try:
            return int(_settings_of(admin, ResourceType.TOPIC, topic, seconds)["max.message.bytes"])
        except KafkaException as exception:
            # A broker without this request never answers; metadata came, so it is not down.
            self._describes = error_of(exception).code() != KafkaError._TIMED_OUT
        except (KeyError, ValueError, TimeoutError):
            self._describes = False
        return None


def check(settings: ClientSettings, topic: str | None, seconds: float) -> str | None:
    """Why the cluster, or ``topic`` on it, would take no events now; nothing when it would. Creates no topic."""
    log = ClientLog(settings)
    admin = _admin(settings, log, create_topics=False)
    deadline = time.monotonic() + seconds
    try:
        found = _metadata(admin, log, topic, deadline)
    except NotReady as reason:
        return str(reason)
    error = found.topics[topic].error if topic is not None else None
    if error is None or (error.name() in _NOT_YET and _creates_topics(admin, found, deadline)):
        return None
    return f"topic {topic}: {settings.describe(error)}"


def _creates_topics(admin: AdminClient, cluster: ClusterMetadata, deadline: float) -> bool:
    """Whether the broker says that it creates a topic when a record comes for it."""
    broker = str(next(iter(cluster.brokers), 0))
    seconds = max(deadline - time.monotonic(), 0.1)
    try:
        return _settings_of(admin, ResourceType.BROKER, broker, seconds).get("auto.create.topics.enable") == "true"
    except (KafkaException, TimeoutError):
        return False


def _admin(settings: ClientSettings, log: ClientLog, *, create_topics: bool) -> AdminClient:
    # A client that waits for an answer connects again every few milliseconds: its log lines would flood.
    config: dict[str, Any] = {**settings.admin(create_topics=create_topics), **log.callbacks(), "log_level": 0}
    return AdminClient(config, logger=log)


def _metadata(admin: AdminClient, log: ClientLog, topic: str | None, deadline: float) -> ClusterMetadata:
    try:
        return admin.list_topics(topic, timeout=max(deadline - time.monotonic(), 0.1))
    except KafkaException as exception:
        log.failed(error_of(exception))
        reason = log.last_error
        # Serving the client's own errors, such as a refused password, may replace it by the cause.
        admin.poll(0)
        raise NotReady(log.last_error or reason) from None


def _settings_of(admin: AdminClient, of: ResourceType, name: str, seconds: float) -> dict[str, str]:
    """All settings of a topic or a broker. Raises KafkaException or TimeoutError."""
    ask = cast("Any", admin).describe_configs
    asked: dict[object, Future[dict[str, Any]]] = ask([ConfigResource(of, name)], request_timeout=seconds)
    (found,) = asked.values()
    return {setting: str(entry.value) for setting, entry in found.result(seconds + 1).items()}
