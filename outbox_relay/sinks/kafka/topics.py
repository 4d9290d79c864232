"""The topics of one sink: that of each event, their partitions and limits, their creation, and their troubles.

Requests block.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ResourceType  # pyright: ignore[reportPrivateImportUsage] - the module lacks __all__
from confluent_kafka.cimpl import NewTopic

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Unavailable
from outbox_relay.domain.routing import matches
from outbox_relay.formats.headers import own_headers
from outbox_relay.formats.topics import INTERNAL_PREFIX, TopicTemplate
from outbox_relay.sinks.kafka.checks import NOT_YET, Cluster, ClusterUnavailable
from outbox_relay.sinks.kafka.errors import error_of
from outbox_relay.sinks.kafka.settings import ClientLog, ClientSettings

CREATION_SECONDS = 1.0
"""Maximum wait for a topic that is being created, by the broker or by the sink."""
CONFIG_SECONDS = 1.0
"""Timeout of requests for the settings of topics. Not every broker knows them, not every user may read them."""
MAX_AGE_SECONDS = 10.0
"""Age from which metadata are read again before an event is refused because of them."""
MIN_BATCH_BYTES = 1_000
MAX_TOPICS = 4_096
"""Maximum number of topics remembered."""
PAUSE_SECONDS = 0.02
PROBE_SECONDS = 1.0
"""Time until the first probe of a topic in trouble, doubled after each failed probe."""
MAX_PROBE_SECONDS = 60.0
MAX_TROUBLES = 1_000
"""Maximum number of topics in trouble. Beyond it the oldest one is forgotten, and its topic is tried again."""


class TopicCreation(NamedTuple):
    """The settings of topics that the relay creates."""

    partitions: int
    replication_factor: int


class TopicResolver:
    """Finds the topic of each event.

    ``allowed`` are patterns of the topics that events may name. Without any, every topic is allowed except Kafka's
    internal topics, whose names begin with ``__``.
    """

    def __init__(self, template: TopicTemplate, allowed: Sequence[str] = ()) -> None:
        self.constant = None if template.fields else template.render("", None, {})
        """The topic of all events if the template has no field, else None."""
        self._template = template
        self._allowed = tuple(allowed)
        self._checked: set[str] = set()
        self._uses_headers = any(name.startswith("headers.") for name in template.fields)

    def topic(self, event: StoredEvent) -> str:
        """Return the topic of ``event``. Raise ValueError, with the reason, if it has none."""
        headers = dict(own_headers(event.headers)) if self._uses_headers and event.headers else {}
        topic = self._template.render(event.type, event.key, headers)
        if topic not in self._checked:
            self._check(topic)
        return topic

    def of_type(self, event_type: str) -> str | None:
        """Return the topic of events of ``event_type``, or None if it depends on more than that."""
        if self.constant is not None or self._template.fields != ("type",):
            return self.constant
        try:
            return self._template.render(event_type, None, {})
        except ValueError:
            return None

    def _check(self, topic: str) -> None:
        """Raise ValueError, with the setting to change, if ``topic`` is not allowed."""
        if topic.startswith(INTERNAL_PREFIX):
            raise ValueError(f"topic {topic}: names that begin with {INTERNAL_PREFIX} are Kafka's own")
        if self._allowed and not any(matches(pattern, topic) for pattern in self._allowed):
            raise ValueError(f"topic {topic} is not among the topics of this sink: add it to the setting topics")
        if len(self._checked) >= MAX_TOPICS:
            self._checked.clear()
        self._checked.add(topic)


class TopicMetadata:
    """The known topics, and the size of batches that all of them take. Missing topics are created with ``creation``."""

    def __init__(self, settings: ClientSettings, log: ClientLog, creation: TopicCreation | None = None) -> None:
        self.batch_bytes = settings.batch_bytes
        """The ``batch.size`` that fits the lowest limit of the known topics."""
        self._settings = settings
        self._log = log
        self._creation = creation
        self._known: dict[str, tuple[int, float]] = {}
        """The number of partitions of each topic, and when it was read."""
        self._reads_configs = True

    def unknown(self, topics: Iterable[str]) -> list[str]:
        """Return those of ``topics`` that are not known."""
        return [topic for topic in topics if topic not in self._known]

    def partitions(self, topic: str) -> float:
        """Return the number of partitions of ``topic``, infinite if it is not known."""
        return self._known.get(topic, (math.inf,))[0]

    def load(self, topics: Sequence[str], seconds: float, *, patient: bool) -> Mapping[str, str]:
        """Request metadata of ``topics`` and return the reasons for those that accept no events.

        The request may make a broker create a topic; with ``patient`` wait for that. Takes little longer than
        ``seconds``. Raise ``ClusterUnavailable`` if the cluster does not answer.
        """
        cluster = Cluster(self._settings, self._log, seconds, create_topics=self._creation is None)
        refused: dict[str, str] = {}
        missing = self._look_up(cluster, topics, refused)
        if missing and self._creation is not None:
            patient, missing = True, self._create(cluster, self._creation, missing, refused)
        wait_until = time.monotonic() + CREATION_SECONDS
        while missing and patient and time.monotonic() < wait_until:
            time.sleep(PAUSE_SECONDS)
            missing = self._look_up(cluster, missing, refused)
        return refused

    def refresh(self, topic: str, seconds: float) -> None:
        """Read the metadata of ``topic`` again if they are old. Keep them if there is no answer."""
        count, read_at = self._known.get(topic, (0, math.inf))
        if time.monotonic() - read_at > MAX_AGE_SECONDS:
            self._known[topic] = count, time.monotonic()
            with contextlib.suppress(ClusterUnavailable):
                self.load([topic], seconds, patient=False)

    def forget(self, topic: str) -> None:
        """Discard the metadata of ``topic``."""
        self._known.pop(topic, None)

    def clear(self) -> None:
        """Discard all metadata: much may change while a destination is down."""
        self._known.clear()
        self.batch_bytes, self._reads_configs = self._settings.batch_bytes, True

    def _look_up(self, cluster: Cluster, topics: Sequence[str], refused: dict[str, str]) -> list[str]:
        """Add each of ``topics`` to the known or to the ``refused`` ones. Return those that are missing."""
        missing: list[str] = []
        for topic in topics:
            found = cluster.metadata(topic).topics[topic]
            if found.error is None:
                if len(self._known) >= MAX_TOPICS:
                    self._known.clear()
                self._known[topic] = len(found.partitions), time.monotonic()
                refused.pop(topic, None)
                self._fit_batches(cluster, topic)
                continue
            refused[topic] = f"topic {topic}: {self._settings.describe(found.error)}"
            if found.error.name() in NOT_YET:
                missing.append(topic)
        return missing

    def _create(
        self, cluster: Cluster, creation: TopicCreation, topics: Sequence[str], refused: dict[str, str]
    ) -> list[str]:
        """Create ``topics`` and return those that exist now or soon."""
        created: list[str] = []
        errors = cluster.create([NewTopic(topic, creation.partitions, creation.replication_factor) for topic in topics])
        for topic in topics:
            error = errors.get(topic)
            if topic not in errors or (error is not None and error.code() == KafkaError.TOPIC_ALREADY_EXISTS):
                created.append(topic)
            else:
                reason = "no answer" if error is None else self._settings.describe(error)
                refused[topic] = f"topic {topic}: cannot be created: {reason}"
        return created

    def _fit_batches(self, cluster: Cluster, topic: str) -> None:
        """Lower the size of batches to the readable limit of ``topic``."""
        if not self._reads_configs:
            return
        try:
            config = cluster.config(ResourceType.TOPIC, topic, min(CONFIG_SECONDS, cluster.seconds))
            limit = int(config["max.message.bytes"])
        except KafkaException as exception:
            # A broker without this request never answers. It is not down, since it returned metadata.
            self._reads_configs = error_of(exception).code() != KafkaError._TIMED_OUT
        except (KeyError, ValueError, TimeoutError):
            self._reads_configs = False
        else:
            # The broker counts the framing of a batch too, part of which librdkafka does not foresee.
            self.batch_bytes = max(min(self.batch_bytes, limit - max(limit // 20, 512)), MIN_BATCH_BYTES)


@dataclass(slots=True)
class _Trouble:
    reason: str
    next_probe: float
    delay: float
    probing: bool = False


class TopicTroubles:
    """The topics that accept no events while the rest of the cluster does. Each is probed with single events."""

    def __init__(self) -> None:
        self._by_topic: dict[str, _Trouble] = {}

    def __len__(self) -> int:
        """Return the number of topics in trouble."""
        return len(self._by_topic)

    def __contains__(self, topic: object) -> bool:
        """Return True if ``topic`` is in trouble."""
        return topic in self._by_topic

    def add(self, topic: str, reason: str) -> None:
        """Record that ``topic`` accepts no events. Each failed probe doubles the time until the next one."""
        known, now, delay = self._by_topic.get(topic), time.monotonic(), PROBE_SECONDS
        if known is not None:
            # A record handed over before the trouble began is no probe: its failure changes nothing.
            probed = known.probing or now >= known.next_probe
            delay = min(known.delay * 2, MAX_PROBE_SECONDS) if probed else known.delay
        elif len(self._by_topic) >= MAX_TROUBLES:
            del self._by_topic[next(iter(self._by_topic))]
        self._by_topic[topic] = _Trouble(reason, now + delay, delay)

    def may_request(self, topic: str) -> bool:
        """Return True if ``topic`` is in no trouble, or its next probe is due and none is in flight."""
        known = self._by_topic.get(topic)
        return known is None or (time.monotonic() >= known.next_probe and not known.probing)

    def begin_probe(self, topic: str) -> bool:
        """Return True if an event of ``topic`` may be sent as its probe, which ends with ``add`` or ``end_probe``."""
        if not self.may_request(topic):
            return False
        self._by_topic[topic].probing = True
        return True

    def end_probe(self, topic: str, *, delivered: bool) -> None:
        """End the probe of ``topic``, and its trouble if the event was delivered."""
        if delivered:
            self._by_topic.pop(topic, None)
        elif topic in self._by_topic:
            self._by_topic[topic].probing = False

    def verdict(self, topic: str) -> Unavailable:
        """Return the verdict on an event of ``topic`` that is not sent.

        The event is to be retried some time after the next probe. That time is random, up to about the current delay,
        so that waiting events do not return all at once.
        """
        known = self._by_topic[topic]
        seconds = max(known.next_probe - time.monotonic(), 0.0) + known.delay * (0.1 + random.random())  # noqa: S311
        return Unavailable(known.reason, retry_after_seconds=round(seconds, 3), part=f"topic {topic}")
