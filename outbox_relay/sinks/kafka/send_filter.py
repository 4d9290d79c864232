"""Holds back events whose key or topic takes no events now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from outbox_relay.domain.outcomes import Unavailable
from outbox_relay.sinks.kafka.call import DeliverCall, KeyBlocks
from outbox_relay.sinks.kafka.topic_breakers import TopicBreakers
from outbox_relay.sinks.kafka.topic_metadata import TopicMetadata


class SendFilter:
    """Decides which events of a call may be sent, by the blocks of their keys and the breakers of their topics."""

    def __init__(self, blocks: KeyBlocks, breakers: TopicBreakers, metadata: TopicMetadata) -> None:
        self._blocks = blocks
        self._breakers = breakers
        self._metadata = metadata

    def sendable(self, call: DeliverCall, indexes: Sequence[int]) -> list[int]:
        """Return those of ``indexes`` that may be sent, and make the other events unavailable."""
        now = time.monotonic()
        sendable: list[int] = []
        for index in indexes:
            verdict = self._verdict(call, index, now)
            if verdict is None:
                sendable.append(index)
            else:
                self.hold_back(call, index, verdict)
        return sendable

    def filter_pending(self, call: DeliverCall) -> None:
        """Keep only the pending events of ``call`` that may be sent."""
        call.set_pending(self.sendable(call, call.pending))

    def _verdict(self, call: DeliverCall, index: int, now: float) -> Unavailable | None:
        topic, key = call.topics[index], call.batch[index].key
        blocked = None if key is None else self._blocks.verdict(call, index, key)
        if blocked is not None or topic is None or topic not in self._breakers:
            return blocked
        return None if self._is_probe(call, index, topic, now) else self._breakers.verdict(topic, now)

    def _is_probe(self, call: DeliverCall, index: int, topic: str, now: float) -> bool:
        """Return True if the event is the probe of ``topic``, or becomes it."""
        if call.probes.get(topic) == index:
            return True
        if self._metadata.unknown((topic,)) or not self._breakers.begin_probe(topic, now):
            return False
        call.probes[topic] = index
        return True

    def hold_back(self, call: DeliverCall, index: int, verdict: Unavailable) -> None:
        """Make an event unavailable, and block its key."""
        key = call.batch[index].key
        call.decided[index] = verdict
        if key is not None:
            self._blocks.block(call, index, key, verdict)

    def open_breaker(self, topic: str, reason: str, calls: Iterable[DeliverCall]) -> None:
        """Open the breaker of ``topic``, and discard its metadata and its probes in ``calls``."""
        self._breakers.open(topic, reason, time.monotonic())
        self._metadata.invalidate(topic)
        for call in calls:
            call.probes.pop(topic, None)

    def end_probes(self, call: DeliverCall) -> None:
        """Close the breakers whose probes were delivered by the complete ``call``."""
        for topic, index in call.probes.items():
            (self._breakers.close if call.delivered(index) else self._breakers.cancel_probe)(topic)
