"""Delivery in batches, for sinks that keep the order of their calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from outbox_relay.domain.event import DELIVER_AT, FAULT, StoredEvent
from outbox_relay.domain.in_flight import Chunk
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Verdict
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.context import SUSPECT_CRASHES, DeliveryContext
from outbox_relay.relay.shared_limits import UNLIMITED, Admission

CALL_BYTES = 8 << 20
"""Maximum payload of a call with events of several chunks."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Events of one chunk, by index, that are sent with one call.

    ``number`` orders the chunks.
    """

    number: int
    chunk: Chunk
    indexes: Sequence[int]

    def events(self) -> Sequence[StoredEvent]:
        events = self.chunk.events
        return events if len(self.indexes) == len(events) else [events[i] for i in self.indexes]


class BatchDispatcher:
    """Sends batches in order, several calls at once.

    ``want_more`` is set while no batch waits for its call.

    After an event is unavailable, no batch is sent until every call in flight has returned. The delivered events of a
    key are then a prefix of those handed over. The rest is sent again in order, beginning with a single event that
    shows whether the destination answers.

    While calls take long, few events are read at a time: those that were read while a call waited are sent with it.
    """

    def __init__(self, context: DeliveryContext, want_more: asyncio.Event) -> None:
        self._context = context
        self._want_more = want_more
        self._queue: deque[_Batch] = deque()
        self._undone: list[_Batch] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._calls: asyncio.TaskGroup | None = None
        self._filled = asyncio.Event()
        self._count = 0

    @property
    def under_way(self) -> int:
        """The number of calls that the sink has not answered."""
        return len(self._under_way)

    @property
    def saturated(self) -> bool:
        """True while a batch waits for the calls in flight."""
        return bool(self._queue)

    def put(self, chunk: Chunk) -> None:
        """Deliver ``chunk`` after all chunks that were put before it."""
        self._count += 1
        self._context.limiter.log_flows()
        indexes = range(len(chunk.events))
        step = self._context.sink.max_batch
        is_idle = not (self._queue or self._undone or self._under_way)
        self._queue.extend(_Batch(self._count, chunk, indexes[first : first + step]) for first in indexes[::step])
        if is_idle:
            self._send_at_once()
        if self._queue:
            self._filled.set()

    def _send_at_once(self) -> None:
        """Send the first call without a turn of the event loop, if it need not wait for anything."""
        context = self._context
        if self._calls is None or context.limits.active or not context.parked_limit.has_capacity:
            return
        if (permit := context.breaker.admit_at_once()) is not None:
            self._send(self._calls, self._next_call(UNLIMITED.events), permit, UNLIMITED)

    async def run(self) -> None:
        """Send batches until cancelled."""
        async with asyncio.TaskGroup() as calls:
            self._calls = calls
            try:
                while True:
                    await self._send_next(calls)
            finally:
                self._calls = None  # a group that ends takes no more tasks

    async def _send_next(self, calls: asyncio.TaskGroup) -> None:
        """Send the next call, once it may be sent."""
        await self._wait_for_turn()
        await self._context.parked_limit.wait_for_capacity()
        permit = await self._context.breaker.admit()
        admission = await self._admitted(permit)
        if admission is not None:
            self._send(calls, self._next_call(1 if permit.probe else admission.events), permit, admission)
            if permit.probe:
                await asyncio.wait(self._under_way)
        if permit.probe:
            self._context.breaker.unused(permit)
        if not self.saturated:
            self._want_more.set()

    async def _admitted(self, permit: Permit) -> Admission | None:
        """Wait for the limits of all relays. Return None if the next call must not be sent any more."""
        context, admission = self._context, UNLIMITED
        if context.limits.active:
            waiting = sum(len(batch.indexes) for batch in islice(self._queue, context.sink.max_batch))
            admission = await context.admit("log", 1 if permit.probe else min(waiting, context.sink.max_batch))
            if not (permit.probe or context.breaker.holds(permit)) or context.breaker.handing_over:
                context.limits.withdraw(admission)
                return None
        if self._undone:
            context.limits.withdraw(admission)
            return None
        return admission

    async def _wait_for_turn(self) -> None:
        """Wait until there is a batch to send and room for the call.

        Undone batches are sent first.
        """
        while self._undone or not self._queue or len(self._under_way) >= self._context.sink.max_in_flight:
            if self._undone and not self._under_way:
                self._queue.extendleft(sorted(self._undone, key=lambda b: (b.number, b.indexes[0]), reverse=True))
                self._undone.clear()
            elif self._under_way and (self._undone or self._queue):
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            else:
                self._filled.clear()
                await self._filled.wait()

    def _first_events(self, most: int) -> _Batch:
        """Take the first batch from the queue, or the first events of it."""
        batch = self._queue.popleft()
        if len(batch.indexes) <= most:
            return batch
        self._queue.appendleft(_Batch(batch.number, batch.chunk, batch.indexes[most:]))
        return _Batch(batch.number, batch.chunk, batch.indexes[:most])

    def _next_call(self, most: int) -> list[_Batch]:
        """Take the first batch from the queue, and those that fit into the same call, with at most ``most`` events."""
        batches = [self._first_events(most)]
        most = min(most, self._context.sink.max_batch)
        events, size = len(batches[0].indexes), batches[0].chunk.size
        while self._queue:
            batch = self._queue[0]
            events, size = events + len(batch.indexes), size + batch.chunk.size
            if events > most or size > CALL_BYTES:
                break
            batches.append(self._queue.popleft())
        return batches

    def _send(self, calls: asyncio.TaskGroup, batches: list[_Batch], permit: Permit, admission: Admission) -> None:
        task = calls.create_task(self._call(batches, permit, admission))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if admission is not UNLIMITED:
            task.add_done_callback(admission.end)

    async def _call(self, batches: list[_Batch], permit: Permit, admission: Admission) -> None:
        """Send one call. If it raises, no other is sent at once: the session ends."""
        try:
            await self._deliver(batches, permit, admission)
        except BaseException:
            self._calls = None
            raise

    async def _deliver(self, batches: list[_Batch], permit: Permit, admission: Admission) -> None:
        """Send one call, unless an earlier one came back undone since this one was begun."""
        if self._undone:
            self._undone += batches
            self._context.limits.refund(admission, 0)
            return
        batches = [deliverable for batch in batches if (deliverable := self._deliverable(batch)).indexes]
        parts = [batch.events() for batch in batches]
        self._context.limits.refund(admission, sum(map(len, parts)))
        if not batches:
            return
        events = parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
        verdicts, seconds = await self._context.deliver(events)
        if verdicts.count(DELIVERED) == len(events):
            self._context.delivered(permit)
            self._context.record_delivered(events, verdicts, seconds)
            for batch in batches:
                self._done(batch)
            return
        answers = iter(verdicts)
        for batch in batches:
            self._apply(batch, list(islice(answers, len(batch.indexes))), permit, seconds)

    def _deliverable(self, batch: _Batch) -> _Batch:
        """Park the events that must not be delivered now, and return the others."""
        context, events = self._context, batch.events()
        crashed = any(lease.crashes >= SUSPECT_CRASHES for lease in context.leases.held.values())
        odd = any(map(DELIVER_AT, events)) or any(map(FAULT, events))
        if not crashed and not odd and not len(context.blocked):
            return batch
        indexes = [index for index in batch.indexes if not context.park_unless_deliverable(batch.chunk, index)]
        return _Batch(batch.number, batch.chunk, indexes)

    def _done(self, batch: _Batch) -> None:
        if len(batch.indexes) == len(batch.chunk.events):
            self._context.settler.done(batch.chunk)
        else:
            for index in batch.indexes:
                self._context.settler.done(batch.chunk, index)

    def _apply(self, batch: _Batch, verdicts: Sequence[Verdict], permit: Permit, seconds: float) -> None:
        """Settle a batch by event.

        The undelivered events of a key that becomes blocked wait for its row.
        """
        context, chunk = self._context, batch.chunk
        undone: list[int] = []
        for index, verdict in zip(batch.indexes, verdicts, strict=True):
            event = chunk.events[index]
            if isinstance(verdict, Delivered):
                context.done(chunk, index, verdict, seconds)
            elif event.key in context.blocked and context.keyed(event):
                context.park(chunk, index, "held")
            elif not context.apply(chunk, index, verdict, permit, seconds):
                undone.append(index)
        if undone:
            self._undone.append(_Batch(batch.number, chunk, undone))
            self._filled.set()
