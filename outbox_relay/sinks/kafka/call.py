"""One call of ``deliver`` as the thread sees it: what was handed over, what came back, what the verdicts are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import cast

from confluent_kafka import KafkaError, Message

from outbox_relay.domain.event import Event
from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable, Verdict

BEHIND = Unavailable("an earlier event of its key was refused, and dead letters hold their key", behind=True)
"""The verdict on what is not sent for that."""


@dataclass(slots=True, eq=False)
class DeliveryRound:
    """A stretch of calls that stand or fall together: after the sink gave up, none of them is handed over.

    A new course begins only when every call of the last one has returned, so that whoever calls has seen the end.
    """

    under_way: int = 0
    """Calls that have not returned yet; counted in the event loop."""
    ended: str | None = None
    """Why nothing more is handed over."""
    withdrawn: bool = False
    """Whether what was handed over is to be taken back too."""


@dataclass(slots=True, eq=False)
class KeyBlock:
    """An event of a key is unavailable, or refused and holds its key.

    What comes later of the key is unavailable too, up to the call number ``last``.
    """

    number: int
    place: int
    verdict: Unavailable
    last: float = math.inf
    """Calls with a higher number were begun by someone who knew of this; set when the call with the event returns."""


class KeyBlocks:
    """The keys of which an event is unavailable, or holds them, while calls are under way that may have later ones."""

    def __init__(self) -> None:
        self._by_key: dict[str, KeyBlock] = {}

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._by_key)

    def on(self, call: DeliverCall, place: int, key: str) -> Unavailable | None:
        """The verdict on the event of ``key`` at ``place`` of ``call`` if an earlier one of the key blocks it."""
        block = self._by_key.get(key)
        if block is None or call.number > block.last or (call.number, place) <= (block.number, block.place):
            return None
        return block.verdict

    def begin(self, call: DeliverCall, place: int, key: str, verdict: Unavailable) -> None:
        """Block what comes after the event of ``key`` at ``place`` of ``call``."""
        block = self._by_key.get(key)
        if block is None:
            block = self._by_key[key] = KeyBlock(call.number, place, verdict)
        block.last = math.inf
        call.blocks.append(block)
        if call.returned_at is not None:
            block.last = call.returned_at

    def prune(self, oldest: int) -> None:
        """Forget what concerns no call from number ``oldest`` on."""
        if self._by_key:
            self._by_key = {key: block for key, block in self._by_key.items() if block.last >= oldest}


class DeliveryReports:
    """Counts the delivery reports of one call and keeps those that failed, by place; serves one call after another.

    One callback per place, made once: nothing is made per event.
    """

    __slots__ = ("callbacks", "count", "failures", "partitions")

    def __init__(self, places: int) -> None:
        self.count = 0
        self.failures: dict[int, KafkaError] = {}
        self.partitions: set[tuple[str, int]] | None = None
        """Where to note topics and partitions of acknowledged records, if anybody wants to know."""
        self.callbacks: Sequence[Callable[[KafkaError | None, object], None]] = [
            partial(self._report, place) for place in range(places)
        ]

    def clear(self) -> None:
        """Begin anew, once every report of the last call has come."""
        self.count = 0
        self.failures = {}
        self.partitions = None

    def _report(self, place: int, error: KafkaError | None, record: object) -> None:
        self.count += 1
        if error is not None:
            self.failures[place] = error
        elif self.partitions is not None:
            message = cast("Message", record)
            self.partitions.add((message.topic() or "", message.partition() or 0))


@dataclass(slots=True, eq=False)
class DeliverCall:
    """A batch on its way. ``until`` is a ``lease_clock()`` value, ``deadline`` one of ``time.monotonic()``.

    ``number`` counts calls in the order in which they were made. ``answer`` takes the verdicts, in the thread,
    exactly once.
    """

    number: int
    batch: Sequence[Event]
    until: float
    """Nothing is handed over from here on."""
    deadline: float
    """By now the call must have been answered."""
    course: DeliveryRound
    answer: Callable[[Sequence[Verdict]], None]
    reports: DeliveryReports
    todo: Sequence[int]
    """Places not handed over yet, in order."""
    topics: Sequence[str | None] = ()
    """The topic of each place; none where the event was refused before."""
    producers: int | Sequence[int] = ()
    """By which producer a place is sent, by the size of its batches: one for all places, or one for each."""
    probes: dict[str, int] = field(default_factory=dict[str, int])
    """The place that finds out whether a topic takes events again, by topic."""
    sent: int = 0
    """Records handed over, those sent again counted again."""
    judged: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    """Verdicts that stand already, by place."""
    lost: Sequence[int] = ()
    """Places given up."""
    blocks: list[KeyBlock] = field(default_factory=list[KeyBlock])
    """What this call blocks."""
    holding: KeyBlocks | None = None
    """Where to block the keys of refused events, if those hold them."""
    returned_at: int | None = None
    """The number of the newest call when this one returned; set in the event loop."""

    @property
    def outstanding(self) -> int:
        """Records handed over and not reported on yet."""
        return self.sent - self.reports.count

    @property
    def complete(self) -> bool:
        """Whether nothing more will be heard of any place."""
        return not self.todo and self.sent == self.reports.count

    def refuse(self, place: int, reason: str) -> None:
        """The event at ``place`` will never be taken. If it holds its key, nothing later of the key is to be sent."""
        self.judged[place] = Refused(reason)
        key = self.batch[place].key
        if self.holding is not None and key is not None:
            self.holding.begin(self, place, key, BEHIND)

    def give_up(self) -> None:
        """Hand over nothing more."""
        self.lost = [*self.lost, *self.todo]
        self.todo = ()

    def returned(self, newest: int) -> None:
        """Note, in the event loop, that whoever called knows the verdicts before any call after ``newest``."""
        self.returned_at = newest
        for block in list(self.blocks):
            block.last = newest

    def delivered(self, place: int) -> bool:
        """Whether the event at ``place`` of a complete call was acknowledged."""
        return place not in self.judged and place not in self.reports.failures and place not in self.lost

    def verdicts(self, blocks: KeyBlocks) -> Sequence[Verdict]:
        """One verdict per place. What follows an unavailable event of its key is unavailable, acknowledged or not.

        What follows one that was refused and holds its key was not sent; what another topic had taken by then is out.
        """
        verdicts: list[Verdict] = [DELIVERED] * len(self.batch)
        if self.course.ended is None and not self.judged and not len(blocks):
            return verdicts
        unavailable = Unavailable(self.course.ended or "")
        for place, verdict in self.judged.items():
            verdicts[place] = verdict
        for place in chain(self.lost, self.reports.failures):
            verdicts[place] = unavailable
        if not len(blocks) and not any(isinstance(verdict, Unavailable) for verdict in verdicts):
            return verdicts
        for place, event in enumerate(self.batch):
            if event.key is None:
                continue
            verdict = verdicts[place]
            if blocked := blocks.on(self, place, event.key):
                verdicts[place] = verdict if blocked.behind and verdict is DELIVERED else blocked
            elif isinstance(verdict, Unavailable):
                blocks.begin(self, place, event.key, verdict)
        return verdicts
