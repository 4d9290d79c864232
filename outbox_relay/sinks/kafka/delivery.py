"""The calls that are being delivered: their pending events, delivery reports and verdicts, and the blocked keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

from confluent_kafka import KafkaError, Message

from outbox_relay.domain.outcomes import DELIVERED, Delivered, Unavailable, Verdict
from outbox_relay.sinks.calls import Call

BEHIND = Unavailable("an earlier event of its key was refused, and dead letters hold their key", behind=True)
"""The verdict on events that are not sent for that reason."""


class Encoder(Protocol):
    """Makes the values of records that have one schema."""

    @property
    def content_type(self) -> str:
        """Return the content type of the values."""
        ...

    def encode(self, topic: str, payload: bytes) -> bytes:
        """Return the value for ``payload``. Raise ValueError, without any value of it, if it does not fit."""
        ...


class Delivery:
    """One call. Once it has ended, the object serves another one.

    There is one callback per index, created once, so a delivery report allocates nothing.
    """

    __slots__ = (
        *("_collects", "acknowledgements", "blocks", "call", "callbacks", "deadline", "decided", "encoders", "events"),
        *("extended", "failures", "handed_over", "has_rows", "number", "partitions", "pending", "prepared", "probes"),
        *("reported", "topics", "until"),
    )

    def __init__(self, max_batch: int) -> None:
        self.callbacks: Sequence[Callable[[KafkaError | None, object], None]] = [
            partial(self._report, index) for index in range(max_batch)
        ]

    def begin(self, call: Call, number: int, deadline: float, *, details: bool) -> None:
        """Begin ``call``. Numbers rise in the order of the calls. With ``details`` the verdicts have those of Kafka."""
        self.call = call
        self.number = number
        self.events = call.events
        self.has_rows = call.attempt > 0
        self.deadline = deadline
        """A ``lease_clock()`` value from which on no record is waited for."""
        self.until = call.until
        """A ``lease_clock()`` value from which on no event is handed over."""
        self.extended = False
        """True if the call lasts longer than it should have."""
        self.pending: Sequence[int] = range(len(self.events))
        """Indexes of the events that are still to be handed over, in order."""
        self.prepared = False
        """True if topics and encoders of the pending events are known."""
        self.topics: list[str] = []
        self.encoders: list[Encoder | None] = []
        """The encoder of each event; empty for a sink without a schema registry."""
        self.probes: dict[str, int] = {}
        """For each probed topic the index of the event that probes it."""
        self.decided: dict[int, Verdict] = {}
        """Verdicts other than delivered, by index."""
        self.blocks: list[KeyBlock] = []
        """The blocks that events of this call began."""
        self.handed_over = 0
        """Number of records handed over. A record that is sent again counts again."""
        self.reported = 0
        self.failures: dict[int, KafkaError] = {}
        self.acknowledgements: dict[int, Verdict] | None = {} if details else None
        """Verdicts with partition and offset by index; None unless they are collected."""
        self.partitions: set[tuple[str, int]] | None = None
        """Takes topic and partition of acknowledged records, or None."""
        self._collects = details

    @property
    def outstanding(self) -> int:
        """Return the number of records without a delivery report."""
        return self.handed_over - self.reported

    @property
    def complete(self) -> bool:
        """Return True if every event has its verdict."""
        return not self.pending and self.handed_over == self.reported and not self.failures

    def collect_partitions(self, partitions: set[tuple[str, int]]) -> None:
        """Add topic and partition of every acknowledged record to ``partitions`` from now on."""
        self.partitions = partitions
        self._collects = True

    def _report(self, index: int, error: KafkaError | None, record: object) -> None:
        self.reported += 1
        if error is not None:
            self.failures[index] = error
        elif self._collects:
            self._collect(index, cast("Message", record))

    def _collect(self, index: int, message: Message) -> None:
        topic, partition = message.topic() or "", message.partition() or 0
        if self.partitions is not None:
            self.partitions.add((topic, partition))
        if self.acknowledgements is not None:
            detail = {"topic": topic, "partition": partition, "offset": message.offset() or 0}
            self.acknowledgements[index] = Delivered(seconds=message.latency(), detail=detail)

    def extend(self, until: float) -> None:
        """Let the call last until the ``lease_clock()`` value ``until``, if that is later than before."""
        if until > self.deadline:
            self.deadline, self.extended = until, True
            self.until = max(self.until, until)

    def abandon(self, verdict: Unavailable) -> None:
        """Make every event unavailable that is pending or failed."""
        self.decided.update(dict.fromkeys((*self.pending, *self.failures), verdict))
        self.pending, self.failures = (), {}

    def abandon_all(self, verdict: Unavailable) -> None:
        """Make the whole batch unavailable: it is not known which of its records were acknowledged."""
        self.pending, self.handed_over = range(len(self.events)), self.reported
        self.abandon(verdict)

    def end(self, blocks: KeyBlocks) -> Call:
        """End the call and return it. Events after an unavailable one of their key are unavailable too.

        That holds even for acknowledged records. After a refused event that holds its key, acknowledged records of
        other topics stay delivered.
        """
        call, self.events, events = self.call, (), self.events
        del self.call
        if not self.decided and not blocks and self.acknowledgements is None:
            call.end(None)
            return call
        found, acknowledged = self.decided, self.acknowledgements or {}
        verdicts = [found.get(i) or acknowledged.get(i, DELIVERED) for i in range(len(events))]
        if found or blocks:
            for index, event in enumerate(events):
                if (key := event.key) is None:
                    continue
                verdict = verdicts[index]
                if blocked := blocks.verdict(self, index, key):
                    verdicts[index] = verdict if blocked is BEHIND and isinstance(verdict, Delivered) else blocked
                elif isinstance(verdict, Unavailable):
                    blocks.block(self, index, key, verdict)
        call.end(verdicts)
        return call


@dataclass(slots=True, eq=False)
class KeyBlock:
    """A key with an unavailable event, or with a refused event that holds its key, at a place: call and index."""

    place: tuple[int, int]
    verdict: Unavailable
    last_call: float = math.inf
    """The newest call that began before the verdict was known. Later ones are not blocked."""


class KeyBlocks:
    """The blocked keys: later events of them are unavailable too, up to the calls that begin with the verdict known."""

    def __init__(self) -> None:
        self._by_key: dict[str, KeyBlock] = {}

    def __len__(self) -> int:
        """Return the number of blocked keys."""
        return len(self._by_key)

    def verdict(self, delivery: Delivery, index: int, key: str) -> Unavailable | None:
        """Return the verdict on the event of ``key`` if an earlier one blocks it, or None."""
        block = self._by_key.get(key)
        if block is None or delivery.number > block.last_call or (delivery.number, index) <= block.place:
            return None
        return block.verdict

    def block(self, delivery: Delivery, index: int, key: str, verdict: Unavailable) -> None:
        """Block the events of ``key`` after the one at ``index`` of ``delivery``."""
        place = (delivery.number, index)
        block = self._by_key.setdefault(key, KeyBlock(place, verdict))
        if place < block.place:
            block.place, block.verdict = place, verdict
        block.last_call = math.inf
        delivery.blocks.append(block)

    def taken(self, delivery: Delivery, newest: int, oldest: int) -> None:
        """Record that the caller has the verdicts of ``delivery`` before any call after number ``newest`` begins.

        ``oldest`` is the number of the oldest call that has not ended.
        """
        for block in delivery.blocks:
            block.last_call = newest
        if self._by_key:
            self._by_key = {key: block for key, block in self._by_key.items() if block.last_call >= oldest}
