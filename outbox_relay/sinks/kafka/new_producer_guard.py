"""Keeps a new producer from reordering the first records of each key.

A request that fails for good leaves a gap in the sequence numbers of its partition, and the broker refuses later
requests. But the broker detects a gap only in a partition where it has accepted a record of this producer. Otherwise
it accepts the request after a refused one, and the other records of the refused request, sent again, would follow it.
So on a new producer a record waits for an earlier one of its key, until one record of that key, or one in every
partition of the topic, has been acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from outbox_relay.sinks.kafka.call import DeliverCall

MAX_KEYS = 100_000
"""Maximum number of acknowledged keys remembered. Beyond it each of them waits once more."""

TopicKey = tuple[str, str]


class NewProducerGuard:
    """Decides which records a new producer may send now."""

    def __init__(self) -> None:
        self.partitions: set[tuple[str, int]] = set()
        """Topic and number of the partitions with an acknowledged record."""
        self._sent: set[TopicKey] = set()
        self._acknowledged: set[TopicKey] = set()
        self._open_topics: set[str | None] = {None}

    def is_open(self, call: DeliverCall, indexes: Sequence[int]) -> bool:
        """Return True if the topics of all events have an acknowledged record in every partition."""
        return self._open_topics.issuperset(map(call.topics.__getitem__, indexes))

    def sendable(self, call: DeliverCall, indexes: Sequence[int]) -> Sequence[int]:
        """Return the first of ``indexes``, up to an event that must wait for an acknowledgement."""
        sent = set(self._sent)

        def may_send(index: int) -> bool:
            key = self._guarded_key(call, index)
            return key is None or (key not in sent and not sent.add(key))

        return list(takewhile(may_send, indexes))

    def record_sent(self, call: DeliverCall, indexes: Sequence[int]) -> None:
        """Record that the events at ``indexes`` were handed over."""
        self._sent.update(key for index in indexes if (key := self._guarded_key(call, index)) is not None)

    def record_acknowledged(self, partition_count: Callable[[str], int]) -> None:
        """Record that all records were acknowledged; ``partition_count`` returns that of a topic."""
        topics = {topic for topic, _ in self._sent}
        self._acknowledged |= self._sent
        self._sent.clear()
        for topic in topics:
            if sum(name == topic for name, _ in self.partitions) >= partition_count(topic):
                self._open_topics.add(topic)
        if topics <= self._open_topics or len(self._acknowledged) > MAX_KEYS:
            self._acknowledged.clear()

    def _guarded_key(self, call: DeliverCall, index: int) -> TopicKey | None:
        """Return topic and key of the event, or None if it may follow another of its key."""
        topic, key = call.topics[index], call.batch[index].key
        if topic is None or key is None or topic in self._open_topics or (topic, key) in self._acknowledged:
            return None
        return topic, key
