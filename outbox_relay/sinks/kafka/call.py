"""The state of one call of ``deliver``: pending events, delivery reports and verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol, cast

from confluent_kafka import KafkaError, Message

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Refused, Unavailable, Verdict

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


@dataclass(slots=True, eq=False)
class DeliveryRound:
    """Overlapping calls that end together: once the round has ended, none of them hands over another event.

    A new round begins only when every call of the previous one has returned, so the caller has seen its end.
    """

    open_calls: int = 0
    """Calls that have not returned. Counted in the event loop."""
    end_reason: str | None = None
    """Why the round has ended, or None."""
    withdrawn: bool = False
    """True if the records handed over are to be purged as well."""

    def begin_call(self) -> None:
        """Count a call that begins."""
        self.open_calls += 1

    def end_call(self) -> None:
        """Count a call that returns."""
        self.open_calls -= 1

    def end(self, reason: str, *, withdraw: bool = False) -> None:
        """End the round: its calls hand over no more events."""
        self.end_reason = reason
        self.withdrawn = self.withdrawn or withdraw


@dataclass(slots=True, eq=False)
class KeyBlock:
    """A key with an unavailable event, or with a refused event that holds its key.

    Later events of the key are unavailable too, up to the call number ``last_call``.
    """

    call_number: int
    index: int
    verdict: Unavailable
    last_call: float = math.inf
    """Calls with a higher number began when the verdict was known. Set when the call with the event returns."""

    def end_after(self, last_call: float) -> None:
        """Block events of calls up to number ``last_call`` only."""
        self.last_call = last_call


class KeyBlocks:
    """The blocked keys, kept while open calls may have later events of them."""

    def __init__(self) -> None:
        self._by_key: dict[str, KeyBlock] = {}

    def __len__(self) -> int:
        """Return the number of blocked keys."""
        return len(self._by_key)

    def verdict(self, call: DeliverCall, index: int, key: str) -> Unavailable | None:
        """Return the verdict on the event of ``key`` if an earlier one blocks it, or None."""
        block = self._by_key.get(key)
        if block is None or call.number > block.last_call or (call.number, index) <= (block.call_number, block.index):
            return None
        return block.verdict

    def block(self, call: DeliverCall, index: int, key: str, verdict: Unavailable) -> None:
        """Block the events of ``key`` after the one at ``index`` of ``call``."""
        block = self._by_key.get(key)
        if block is None:
            block = self._by_key[key] = KeyBlock(call.number, index, verdict)
        block.end_after(math.inf)
        call.blocks.append(block)
        # Checked after the append: ``DeliverCall.returned`` runs in another thread.
        if call.returned_at is not None:
            block.end_after(call.returned_at)

    def prune(self, oldest_call: int) -> None:
        """Remove the blocks that affect no call from number ``oldest_call`` on."""
        if self._by_key:
            self._by_key = {key: block for key, block in self._by_key.items() if block.last_call >= oldest_call}


class DeliveryReports:
    """Counts the delivery reports of one call and keeps the failures by index; reused by later calls.

    There is one callback per index, created once: nothing is allocated per event, unless acknowledgements are
    collected.
    """

    __slots__ = ("_collects", "_partitions", "acknowledgements", "callbacks", "count", "failures")

    def __init__(self, max_batch: int) -> None:
        self.count = 0
        self.failures: dict[int, KafkaError] = {}
        self.acknowledgements: dict[int, Delivered] | None = None
        """Verdicts with partition and offset by index; None unless they are collected."""
        self._partitions: set[tuple[str, int]] | None = None
        self._collects = False
        self.callbacks: Sequence[Callable[[KafkaError | None, object], None]] = [
            partial(self._report, index) for index in range(max_batch)
        ]

    def clear(self) -> None:
        """Prepare for another call, once every report of the last one was served."""
        self.count = 0
        self.failures = {}
        self.acknowledgements = None
        self._partitions = None
        self._collects = False

    def collect_acknowledgements(self) -> None:
        """Keep topic, partition, offset and latency of every acknowledged record."""
        self.acknowledgements = {}
        self._collects = True

    def collect_partitions(self, partitions: set[tuple[str, int]]) -> None:
        """Add topic and partition of every acknowledged record to ``partitions`` from now on."""
        self._partitions = partitions
        self._collects = True

    def _report(self, index: int, error: KafkaError | None, record: object) -> None:
        self.count += 1
        if error is not None:
            self.failures[index] = error
        elif self._collects:
            self._collect(index, cast("Message", record))

    def _collect(self, index: int, message: Message) -> None:
        topic, partition = message.topic() or "", message.partition() or 0
        if self._partitions is not None:
            self._partitions.add((topic, partition))
        if self.acknowledgements is not None:
            detail = {"topic": topic, "partition": partition, "offset": message.offset() or 0}
            self.acknowledgements[index] = Delivered(seconds=message.latency(), detail=detail)


@dataclass(slots=True, eq=False)
class DeliverCall:
    """A batch that is being delivered. Numbers rise in the order of the calls."""

    number: int
    batch: Sequence[StoredEvent]
    until: float
    """A ``lease_clock()`` value from which on no event is handed over."""
    deadline: float
    """A ``lease_clock()`` value from which on no record is waited for."""
    round: DeliveryRound
    answer: Callable[[Sequence[Verdict]], None]
    """Takes the verdicts, exactly once, in the producer thread."""
    reports: DeliveryReports
    refusal_blocks: KeyBlocks | None = None
    """The keys of refused events, which are blocked; None if refused events do not hold their keys."""
    pending: Sequence[int] = ()
    """Indexes of the events that are still to be handed over, in order."""
    topics: list[str | None] = field(default_factory=list[str | None])
    """The topic of each event; None for an event that was refused before."""
    encoders: list[Encoder | None] = field(default_factory=list[Encoder | None])
    """The encoder of each event; empty for a sink without a schema registry."""
    batch_sizes: int | Sequence[int] = ()
    """The producer of the events, identified by its batch size: one for all, or one for each."""
    probes: dict[str, int] = field(default_factory=dict[str, int])
    """For each probed topic the index of the event that probes it."""
    handed_over: int = 0
    """Number of records handed over. A record that is sent again counts again."""
    decided: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    """Verdicts other than delivered, by index."""
    abandoned: Sequence[int] = ()
    """Indexes of the events that the ended round left undelivered."""
    blocks: list[KeyBlock] = field(default_factory=list[KeyBlock])
    """The blocks that events of this call began."""
    returned_at: int | None = None
    """The newest call's number when this call returned. Set in the event loop."""
    has_rows: bool = False
    """True if the events have rows, whose leases the relay extends up to ``deadline``."""
    extended: bool = False
    """True if the call lasts longer than it should have."""

    def __post_init__(self) -> None:
        self.pending = range(len(self.batch))

    @property
    def outstanding(self) -> int:
        """Return the number of records without a delivery report."""
        return self.handed_over - self.reports.count

    @property
    def complete(self) -> bool:
        """Return True if no event is pending or without a delivery report."""
        return not self.pending and self.handed_over == self.reports.count

    def refuse(self, index: int, reason: str) -> None:
        """Refuse the event at ``index``, and block its key where refused events hold it."""
        self.decided[index] = Refused(reason)
        key = self.batch[index].key
        if self.refusal_blocks is not None and key is not None:
            self.refusal_blocks.block(self, index, key, BEHIND)

    def refuse_unsent(self, index: int, reason: str) -> None:
        """Refuse the event at ``index`` before it is handed over."""
        self.topics[index] = None
        self.refuse(index, reason)

    def set_topics(self, topics: list[str | None]) -> None:
        """Set the topic of each event."""
        self.topics = topics

    def set_encoders(self, encoders: list[Encoder | None]) -> None:
        """Set the encoder of each event."""
        self.encoders = encoders

    def set_batch_sizes(self, batch_sizes: int | Sequence[int]) -> None:
        """Choose the producers, by their batch sizes."""
        self.batch_sizes = batch_sizes

    def set_pending(self, indexes: Sequence[int]) -> None:
        """Replace the pending indexes."""
        self.pending = indexes

    def count_handed_over(self, records: int) -> None:
        """Count records that were handed over."""
        self.handed_over += records

    def extend(self, until: float) -> None:
        """Let the call last until the ``lease_clock()`` value ``until``, if that is later than before."""
        if until > self.deadline:
            self.deadline, self.extended = until, True
            self.until = max(self.until, until)

    def abandon(self, *indexes: int) -> None:
        """Leave the events at ``indexes`` undelivered."""
        self.abandoned = [*self.abandoned, *indexes]

    def abandon_unreported(self) -> None:
        """Leave the whole batch undelivered: it is not known which of its records were acknowledged."""
        if self.outstanding:
            self.abandoned = range(len(self.batch))
            self.handed_over = self.reports.count

    def end_round(self, reason: str) -> None:
        """End the round and abandon the pending events."""
        self.round.end(reason)
        self.abandon_pending()

    def abandon_pending(self) -> None:
        """Leave the pending events undelivered."""
        self.abandon(*self.pending)
        self.pending = ()

    def returned(self, newest: int) -> None:
        """Record, in the event loop, that the caller has the verdicts before any call after ``newest`` begins."""
        self.returned_at = newest
        for block in list(self.blocks):
            block.end_after(newest)

    def delivered(self, index: int) -> bool:
        """Return True if the event at ``index`` of this complete call was acknowledged."""
        return index not in self.decided and index not in self.reports.failures and index not in self.abandoned

    def verdicts(self, blocks: KeyBlocks) -> Sequence[Verdict]:
        """Return one verdict per event. Events after an unavailable one of their key are unavailable.

        That holds even for acknowledged records. After a refused event that holds its key, acknowledged records of
        other topics stay delivered.
        """
        verdicts = self._verdicts(blocks)
        acknowledgements = self.reports.acknowledgements
        if acknowledgements is None:
            return verdicts
        return [acknowledgements.get(i, each) if each is DELIVERED else each for i, each in enumerate(verdicts)]

    def _verdicts(self, blocks: KeyBlocks) -> Sequence[Verdict]:
        verdicts: list[Verdict] = [DELIVERED] * len(self.batch)
        if self.round.end_reason is None and not self.decided and not len(blocks):
            return verdicts
        unavailable = Unavailable(self.round.end_reason or "")
        for index, verdict in self.decided.items():
            verdicts[index] = verdict
        for index in chain(self.abandoned, self.reports.failures):
            verdicts[index] = unavailable
        if len(blocks) or any(isinstance(verdict, Unavailable) for verdict in verdicts):
            self._apply_blocks(verdicts, blocks)
        return verdicts

    def _apply_blocks(self, verdicts: list[Verdict], blocks: KeyBlocks) -> None:
        for index, event in enumerate(self.batch):
            if event.key is None:
                continue
            verdict = verdicts[index]
            if blocked := blocks.verdict(self, index, event.key):
                verdicts[index] = verdict if blocked.behind and verdict is DELIVERED else blocked
            elif isinstance(verdict, Unavailable):
                blocks.block(self, index, event.key, verdict)
