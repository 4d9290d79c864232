"""Batches of events, straight from the log, for sinks that keep the order of their calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from outbox_relay.domain.event import DELIVER_AT, FAULT, StoredEvent
from outbox_relay.domain.in_flight import Chunk
from outbox_relay.domain.outcomes import (
    DELIVERED,
    Delivered,
    Verdict,
)
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.context import SUSPECT_CRASHES, DeliveryContext

CALL_BYTES = 8 << 20
"""The most payload of several chunks that one call holds."""


@dataclass(slots=True)
class _Batch:
    """Events of one chunk, by place, that are sent with one call; ``number`` orders chunks."""

    number: int
    chunk: Chunk
    places: Sequence[int]

    def events(self) -> Sequence[StoredEvent]:
        events = self.chunk.events
        return events if len(self.places) == len(events) else [events[i] for i in self.places]


class BatchDispatcher:
    """For sinks that keep the order of their calls.

    When anything comes back unavailable, nothing more is sent until every call under way has returned. What was
    delivered of a key is then a prefix of what was handed over; the rest is sent again in order, first of all
    one event, to see whether the destination answers.

    While calls take long, few events at a time are read; what has come until there is room for a call goes with it.
    """

    def __init__(self, context: DeliveryContext) -> None:
        self._context = context
        self._queue: deque[_Batch] = deque()
        self._undone: list[_Batch] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._filled = asyncio.Event()
        self._count = 0

    @property
    def under_way(self) -> int:
        """Calls that the sink has not answered."""
        return len(self._under_way)

    @property
    def saturated(self) -> bool:
        """Whether a call waits for those under way."""
        return bool(self._queue)

    def put(self, chunk: Chunk) -> None:
        """Deliver ``chunk`` after everything that was put before it."""
        self._count += 1
        places = range(len(chunk.events))
        step = self._context.sink.max_batch
        self._queue.extend(_Batch(self._count, chunk, places[first : first + step]) for first in places[::step])
        self._filled.set()

    def _screened(self, batch: _Batch) -> _Batch:
        """``batch`` without the events that must not be delivered now."""
        context, events = self._context, batch.events()
        crashed = any(lease.crashes >= SUSPECT_CRASHES for lease in context.leases.held.values())
        odd = any(map(DELIVER_AT, events)) or any(map(FAULT, events))
        if not crashed and not odd and not len(context.settler.blocked):
            return batch
        places = [place for place in batch.places if not context.park_unless_deliverable(batch.chunk, place)]
        return _Batch(batch.number, batch.chunk, places)

    async def run(self) -> None:
        """Send what is put, until cancelled."""
        async with asyncio.TaskGroup() as calls:
            while True:
                await self._ready()
                await self._context.breaker.wait_for_capacity()
                permit = await self._context.breaker.admit()
                if not self._undone:
                    self._send(calls, [self._one()] if permit.probe else self._together(), permit)
                    if permit.probe:
                        await asyncio.wait(self._under_way)
                if permit.probe:
                    self._context.breaker.unused(permit)
                if not self.saturated:
                    self._context.want_more()

    async def _ready(self) -> None:
        """Wait until there is a batch to send and room for the call; what came back undone goes first."""
        while self._undone or not self._queue or len(self._under_way) >= self._context.sink.max_in_flight:
            if self._undone and not self._under_way:
                self._queue.extendleft(sorted(self._undone, key=lambda b: (b.number, b.places[0]), reverse=True))
                self._undone.clear()
            elif self._under_way and (self._undone or self._queue):
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            else:
                self._filled.clear()
                await self._filled.wait()

    def _one(self) -> _Batch:
        """The first event of the queue, alone."""
        batch = self._queue.popleft()
        if len(batch.places) > 1:
            self._queue.appendleft(_Batch(batch.number, batch.chunk, batch.places[1:]))
        return _Batch(batch.number, batch.chunk, batch.places[:1])

    def _together(self) -> list[_Batch]:
        """The first batch of the queue, and those behind it that fit into the same call: ``CALL_BYTES`` with them."""
        together = [self._queue.popleft()]
        events, size = len(together[0].places), together[0].chunk.size
        while self._queue:
            batch = self._queue[0]
            events, size = events + len(batch.places), size + batch.chunk.size
            if events > self._context.sink.max_batch or size > CALL_BYTES:
                break
            together.append(self._queue.popleft())
        return together

    def _send(self, calls: asyncio.TaskGroup, batches: list[_Batch], permit: Permit) -> None:
        task = calls.create_task(self._deliver(batches, permit))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _deliver(self, batches: list[_Batch], permit: Permit) -> None:
        """One call. What earlier calls came to is looked at last: they may have ended since this one was begun."""
        context = self._context
        if self._undone:
            self._undone += batches
            return
        batches = [screened for batch in batches if (screened := self._screened(batch)).places]
        if not batches:
            return
        parts = [batch.events() for batch in batches]
        events = parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
        verdicts = await context.deliver(events)
        if verdicts.count(DELIVERED) == len(events):
            context.breaker.delivered(permit)
            for batch in batches:
                self._done(batch)
            return
        answers = iter(verdicts)
        for batch in batches:
            self._sort_out(batch, list(islice(answers, len(batch.places))), permit)

    def _done(self, batch: _Batch) -> None:
        if len(batch.places) == len(batch.chunk.events):
            self._context.settler.done(batch.chunk)
        else:
            for place in batch.places:
                self._context.settler.done(batch.chunk, place)

    def _sort_out(self, batch: _Batch, verdicts: Sequence[Verdict], permit: Permit) -> None:
        """Settle event by event; a key that becomes blocked takes its undelivered rest with it."""
        context, chunk = self._context, batch.chunk
        undone: list[int] = []
        for place, verdict in zip(batch.places, verdicts, strict=True):
            event = chunk.events[place]
            if isinstance(verdict, Delivered):
                context.settler.done(chunk, place)
            elif event.key in context.settler.blocked and context.keyed(event):
                context.park(chunk, place, "held")
            elif not context.apply(chunk, place, verdict, permit):
                undone.append(place)
        if undone:
            self._undone.append(_Batch(batch.number, chunk, undone))
            self._filled.set()
