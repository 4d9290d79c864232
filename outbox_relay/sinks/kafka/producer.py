"""One librdkafka producer, and the guard of its first records."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any

from confluent_kafka import KafkaException, Producer

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.event import StoredEvent
from outbox_relay.sinks.kafka.errors import error_of
from outbox_relay.sinks.kafka.settings import LINGER_MS, ONE_AT_A_TIME, ClientLog, ClientSettings

MAX_KEYS = 100_000
"""Maximum number of acknowledged keys that a guard remembers. Beyond it each of them waits once more."""


class RecordProducer:
    """A librdkafka producer. Only :meth:`serve` serves its delivery reports, and it never raises.

    With ``alone`` it sends one record per request, and a refused record does not end it. Raise
    ``ConfigurationError`` for settings that the client does not accept, and for a file that cannot be used.
    """

    def __init__(self, settings: ClientSettings, log: ClientLog, batch_bytes: int, *, alone: bool = False) -> None:
        self.batch_bytes = batch_bytes
        self.alone = alone
        self.fatal: str | None = None
        """The error after which the producer is unusable, or None."""
        self.guard = None if alone else NewProducerGuard()
        """Limits the first records. None where records are sent alone."""
        self.owing: frozenset[int] = frozenset()
        """The ids of connected brokers that have records and have not acknowledged them, at most a second ago."""
        self._log = log
        self._lingers = settings.flushes_early
        self._lingers_until = -math.inf
        callbacks = {"error_cb": log.unreachable, "stats_cb": self._take_statistics, "throttle_cb": log.throttled}

        config = {**settings.producer(batch_bytes, ONE_AT_A_TIME if alone else {}), **callbacks}
        try:
            self._client: Producer | None = Producer(config, logger=log)
        except KafkaException as exception:
            raise ConfigurationError(f"producer: {settings.describe(error_of(exception))}") from None
        self.produce: Callable[..., None] = self._client.produce

    def close(self) -> None:
        """Destroy the producer with all records that it still has. Blocks for some milliseconds."""
        # Releases the last reference: deallocation ends the client without the flush of its close().
        self._client = None
        del self.produce

    def fail(self, reason: str) -> None:
        """Record that the producer is unusable."""
        self.fatal = self.fatal or reason

    def records_wait(self) -> None:
        """Record that records were handed over, which linger in the client for now."""
        self._lingers_until = time.monotonic() + LINGER_MS / 1000

    def serve(self, seconds: float) -> None:
        """Serve the available reports, or wait up to ``seconds`` for one without letting records linger."""
        # Flushing ends the lingering, and keeps the client's thread busy while a request is in flight. It never has no
        # limit: after a fatal error it may never return.
        client, flushes = self._client, seconds and self._lingers and time.monotonic() < self._lingers_until
        try:
            if client is not None:
                (client.flush if flushes else client.poll)(seconds)
        except KafkaException as exception:
            self.fail(self._log.settings.describe(error_of(exception)))
        except SystemError as exception:
            self.fail(f"the client failed: {type(exception).__name__}")

    def purge(self, *, in_flight: bool) -> None:
        """Purge the unsent records, and with ``in_flight`` those that were sent and not acknowledged. For any thread.

        Their delivery reports must still be served.
        """
        client = self._client
        try:
            if client is not None:
                # The binding inverts this flag: False waits, with Python's lock, for threads that may look a name up.
                client.purge(in_queue=True, in_flight=in_flight, blocking=True)
        except KafkaException as exception:
            self.fail(self._log.settings.describe(error_of(exception)))

    def _take_statistics(self, report: str) -> None:
        """Take the state of the connections from a report (STATISTICS.md)."""
        # The topics come last, are not needed, and grow with their number.
        head, topics, _ = report.partition('"topics":')
        found: dict[str, Any] = json.loads(f"{head.rstrip().rstrip(',')}}}" if topics else report)
        up = [broker for broker in found.get("brokers", {}).values() if broker.get("state") == "UP"]
        self.owing = frozenset(
            each["nodeid"] for each in up if each.get("waitresp_msg_cnt", 0) + each.get("outbuf_msg_cnt", 0)
        )
        if up:
            self._log.trouble = None


TopicKey = tuple[str, str]


class NewProducerGuard:
    """Keeps a new producer from reordering the first records of each key.

    A request that fails for good leaves a gap in the sequence numbers of its partition, and the broker refuses later
    requests. But the broker detects a gap only in a partition where it has accepted a record of this producer.
    Otherwise it accepts the request after a refused one, and the other records of the refused request, sent again,
    would follow it. So on a new producer a record waits for an earlier one of its key, until one record of that key, or
    one in every partition of the topic, has been acknowledged.
    """

    def __init__(self) -> None:
        self.partitions: set[tuple[str, int]] = set()
        """Topic and number of the partitions with an acknowledged record."""
        self._sent: set[TopicKey] = set()
        self._acknowledged: set[TopicKey] = set()
        self._open_topics: set[str] = set()

    def is_open(self, topics: Collection[str]) -> bool:
        """Return True if all ``topics`` have an acknowledged record in every partition."""
        return self._open_topics.issuperset(topics)

    def sendable(self, topics: Sequence[str], events: Sequence[StoredEvent], indexes: Sequence[int]) -> Sequence[int]:
        """Return the first of ``indexes``, up to an event that must wait for an acknowledgement."""
        sent = set(self._sent)

        def may_send(index: int) -> bool:
            key = self._guarded(topics[index], events[index].key)
            return key is None or (key not in sent and not sent.add(key))

        return list(takewhile(may_send, indexes))

    def sent(self, events: Iterable[tuple[str, str | None]]) -> None:
        """Record that events were handed over, given by topic and key."""
        self._sent.update(key for topic, key_ in events if (key := self._guarded(topic, key_)) is not None)

    def record_acknowledged(self, partition_count: Callable[[str], float]) -> None:
        """Record that all records were acknowledged; ``partition_count`` returns that of a topic."""
        topics = {topic for topic, _ in self._sent}
        self._acknowledged |= self._sent
        self._sent.clear()
        for topic in topics:
            if sum(name == topic for name, _ in self.partitions) >= partition_count(topic):
                self._open_topics.add(topic)
        if topics <= self._open_topics or len(self._acknowledged) > MAX_KEYS:
            self._acknowledged.clear()

    def _guarded(self, topic: str, key: str | None) -> TopicKey | None:
        """Return topic and key of an event, or None if it may follow another of its key."""
        if key is None or topic in self._open_topics or (found := (topic, key)) in self._acknowledged:
            return None
        return found
