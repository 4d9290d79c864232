"""Delivering straight from the log: chunks go to the sink in order, what needs individual care becomes a row.

Two ways, by what the sink is. A sink that keeps the order of its calls gets batches, a few under way at once.
A sink of one request per event gets single events, never two of one key at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from typing import NamedTuple, Protocol
from uuid import UUID, uuid4

from outbox_relay.domain.errors import LeaseLost, SessionReset
from outbox_relay.domain.event import DELIVER_AT, FAULT, StoredEvent
from outbox_relay.domain.in_flight import Chunk
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import (
    DELIVERED,
    Attempt,
    Dead,
    Delivered,
    Done,
    Failed,
    Retry,
    StandStill,
    Unavailable,
    Verdict,
    clip,
    decide,
)
from outbox_relay.domain.retry import requested_delay
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.rows import ClaimedRow, NewRow
from outbox_relay.relay.gate import Gate, Pass, Slots
from outbox_relay.relay.leases import Holding
from outbox_relay.relay.settler import Settling
from outbox_relay.sinks import Sink

LEASE_MARGIN_SECONDS = 5.0
"""A row's lease outlasts the request's time limit by at least this."""
CALL_BYTES = 8 << 20
"""The most payload of several chunks that one call holds."""
SUSPECT_CRASHES = 2
"""From this many lapsed leases on, the next events of a shard go through rows, where claims are counted."""
SUSPECT_CLAIMS = 2
"""Claims with which such rows begin. They are claimed together once, since most owners die of something else; what was
claimed three times and never settled is claimed alone."""


def _nobody(*_: object) -> None:
    raise RuntimeError("the rows of this sink are not being served")


class _Kept(NamedTuple):
    """What a row remembers of how its event was tried: attempts counted, the last error, its status and details."""

    attempts: int = 0
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None


NOTHING_KEPT = _Kept()


@dataclass(slots=True)
class Desk:
    """What every part that delivers for one sink works with.

    ``now`` is the database's time as far as is known; ``noise`` draws from [-1, 1]; ``slots`` bounds the
    requests under way of a sink that takes one event each; ``overdue`` is given rows whose request outlasted
    ``park_after_seconds``, with what they were sent by and the verdict to come; ``due_in`` the seconds after which a
    row will be due. ``hungry`` is called when what was read is no longer enough for the sink.
    """

    spec: SinkSpec
    sink: Sink
    holding: Holding
    settling: Settling
    gate: Gate
    now: Callable[[], datetime]
    noise: Callable[[], float]
    slots: Slots
    overdue: Callable[[ClaimedRow, Pass, Awaitable[Verdict]], None] = _nobody
    due_in: Callable[[float], None] = _nobody
    hungry: Callable[[], None] = _nobody

    def until(self, events: Iterable[StoredEvent]) -> float:
        """The ``lease_clock()`` value by which ``events`` must be handed over. Raises ``LeaseLost`` behind it."""
        until = self.holding.until({event.shard for event in events})
        if lease_clock() >= until:
            raise LeaseLost(f"sink {self.spec.name}: a lease could not be renewed in time")
        return until

    async def deliver(self, events: Sequence[StoredEvent]) -> Sequence[Verdict]:
        """One verdict per event of ours. Raises ``LeaseLost`` when a lease ran out before all were handed over."""
        until = self.until(events)
        verdicts = await self.sink.deliver(events, until)
        if lease_clock() >= until and any(isinstance(verdict, Unavailable) for verdict in verdicts):
            self.until(events)
        return verdicts

    def keyed(self, event: StoredEvent) -> bool:
        """Whether the event takes part in the order of a key."""
        return self.spec.ordered and event.key is not None

    def set_aside(self, chunk: Chunk, index: int) -> bool:
        """Park the event at ``index`` as a row if it must not be delivered now; returns whether it was.

        Events with a fault are dead at once. Scheduled events leave the order of their key. Events of a blocked key
        are held behind its rows. Events of a shard whose owners crashed again and again go through rows, where claims
        are counted.
        """
        event = chunk.events[index]
        if event.fault is not None:
            self.park(chunk, index, "dead", kept=_Kept(error=clip(event.fault)))
        elif event.deliver_at is not None and event.deliver_at > self.now():
            self.park(chunk, index, "waiting", ordered=False)
            self.due_in((event.deliver_at - self.now()).total_seconds())
        elif event.key in self.settling.blocked and self.keyed(event):
            self.park(chunk, index, "held")
        elif self._crashes(event) >= SUSPECT_CRASHES:
            self.park(chunk, index, "waiting", claims=SUSPECT_CLAIMS, due_in=0.0)
        else:
            return False
        return True

    def put_off(self, chunk: Chunk, index: int) -> None:
        """Make the event at ``index`` a row, to be tried when the destination is next."""
        if not self.set_aside(chunk, index):
            self.park(chunk, index, "waiting", due_in=self.spec.circuit.probe_seconds)

    def _crashes(self, event: StoredEvent) -> int:
        lease = self.holding.held.get(event.shard)
        if lease is None:
            raise LeaseLost(f"sink {self.spec.name}: a shard was lost while its events were in hand")
        return lease.crashes

    def park(
        self,
        chunk: Chunk,
        index: int,
        state: str,
        *,
        ordered: bool | None = None,
        due_in: float | None = None,
        claims: int = 0,
        lease: UUID | None = None,
        lease_for: float | None = None,
        kept: _Kept = NOTHING_KEPT,
    ) -> int:
        """Make the event at ``index`` a row; returns the number of the settlement that writes it."""
        event = chunk.events[index]
        takes_part = self.keyed(event) if ordered is None else ordered
        row = NewRow(
            *(event.id, event.shard, state, takes_part, due_in, kept.attempts, claims, lease, lease_for),
            *(kept.error, kept.status, kept.attempt),
        )
        scheduled = state == "waiting" and due_in is None
        if state != "dead" and not scheduled:
            self.gate.parked()
        blocks = takes_part and (state != "dead" or self.spec.hold)
        if due_in is not None and state != "dead":
            self.due_in(due_in)
        return self.settling.park(chunk, index, row, blocks=blocks)

    def apply(self, chunk: Chunk, index: int, verdict: Verdict, leave: Pass) -> bool:
        """Settle the event at ``index`` by its first verdict; returns False if it stays where it is."""
        event = chunk.events[index]
        match decide(0, self.judged(event, verdict, leave), self.spec.retry, self.noise()):
            case Done():
                self.settling.done(chunk, index)
            case Retry(delay, attempts, error, status, attempt):
                self.park(chunk, index, "waiting", due_in=delay, kept=_Kept(attempts, error, status, attempt))
            case Dead(attempts, error, status, attempt):
                self.park(chunk, index, "dead", kept=_Kept(attempts, error, status, attempt))
            case StandStill():
                return False
        return True

    def judged(self, event: StoredEvent, verdict: Verdict, leave: Pass, *, failed_before: bool = False) -> Verdict:
        """Tell the circuit of ``verdict``; a failure while it is not closed is the destination's, not the event's.

        But a probe that the destination answered counts as an attempt of its event: that becomes a row, and the next
        probe is another event. Else one that always fails would be every probe, and the circuit would never close.
        An event that ``failed_before`` and does so again says nothing about the destination: such events come together
        when their delays end, would open the circuit and, as probes, keep it open while all others would be taken.
        """
        match verdict:
            case Failed() if failed_before:
                self.gate.unused(leave)
            case Failed(reason, status, retry_after, attempt):
                counts = leave.probe or self.gate.holds(leave)
                self.gate.failed(event.id, reason, leave)
                return verdict if counts else Unavailable(reason, status, retry_after, attempt)
            case Unavailable(behind=True):
                self.gate.unused(leave)
            case Unavailable(part=None):
                self._unavailable(event, verdict, leave)
            case Unavailable():
                self.gate.unused(leave)
                self.gate.trouble(verdict.reason)
            case _:
                self.gate.delivered(leave)
                self.slots.more()
        return verdict

    def _unavailable(self, event: StoredEvent, verdict: Unavailable, leave: Pass) -> None:
        retry_after = requested_delay(verdict.retry_after_seconds, self.spec.retry, self.noise())
        at_once = self.sink.keeps_order
        opened = self.gate.unavailable(event.id, verdict, leave, at_once=at_once, retry_after=retry_after)
        if opened and verdict.throttled:
            self.slots.fewer()


class Delivering(Protocol):
    """A way of delivering chunks. ``put`` hands one over; ``run`` works until cancelled."""

    @property
    def under_way(self) -> int:
        """Calls that the sink has not answered."""
        ...

    @property
    def sated(self) -> bool:
        """Whether so much waits for the sink that what comes meanwhile is better read together, later."""
        ...

    def put(self, chunk: Chunk) -> None:
        """Deliver ``chunk`` after everything that was put before it."""
        ...

    async def run(self) -> None:
        """Deliver what is put, until cancelled."""
        ...


@dataclass(slots=True)
class _Batch:
    """Events of one chunk, by place, that are sent with one call; ``number`` orders chunks."""

    number: int
    chunk: Chunk
    places: Sequence[int]

    def events(self) -> Sequence[StoredEvent]:
        events = self.chunk.events
        return events if len(self.places) == len(events) else [events[i] for i in self.places]


class BatchDelivering:
    """For sinks that keep the order of their calls.

    When anything comes back unavailable, nothing more is sent until every call under way has returned. What was
    delivered of a key is then a prefix of what was handed over; the rest is sent again in order, first of all
    one event, to see whether the destination answers.

    While calls take long, few events at a time are read; what has come until there is room for a call goes with it.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
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
    def sated(self) -> bool:
        """Whether a call waits for those under way."""
        return bool(self._queue)

    def put(self, chunk: Chunk) -> None:
        """Deliver ``chunk`` after everything that was put before it."""
        self._count += 1
        places = range(len(chunk.events))
        step = self._desk.sink.max_batch
        self._queue.extend(_Batch(self._count, chunk, places[first : first + step]) for first in places[::step])
        self._filled.set()

    def _screened(self, batch: _Batch) -> _Batch:
        """``batch`` without the events that must not be delivered now."""
        desk, events = self._desk, batch.events()
        crashed = any(lease.crashes >= SUSPECT_CRASHES for lease in desk.holding.held.values())
        odd = any(map(DELIVER_AT, events)) or any(map(FAULT, events))
        if not crashed and not odd and not len(desk.settling.blocked):
            return batch
        places = [place for place in batch.places if not desk.set_aside(batch.chunk, place)]
        return _Batch(batch.number, batch.chunk, places)

    async def run(self) -> None:
        """Send what is put, until cancelled."""
        async with asyncio.TaskGroup() as calls:
            while True:
                await self._ready()
                await self._desk.gate.room()
                leave = await self._desk.gate.admit()
                if not self._undone:
                    self._send(calls, [self._one()] if leave.probe else self._together(), leave)
                    if leave.probe:
                        await asyncio.wait(self._under_way)
                if leave.probe:
                    self._desk.gate.unused(leave)
                if not self.sated:
                    self._desk.hungry()

    async def _ready(self) -> None:
        """Wait until there is a batch to send and room for the call; what came back undone goes first."""
        while self._undone or not self._queue or len(self._under_way) >= self._desk.sink.max_in_flight:
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
            if events > self._desk.sink.max_batch or size > CALL_BYTES:
                break
            together.append(self._queue.popleft())
        return together

    def _send(self, calls: asyncio.TaskGroup, batches: list[_Batch], leave: Pass) -> None:
        task = calls.create_task(self._deliver(batches, leave))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _deliver(self, batches: list[_Batch], leave: Pass) -> None:
        """One call. What earlier calls came to is looked at last: they may have ended since this one was begun."""
        desk = self._desk
        if self._undone:
            self._undone += batches
            return
        batches = [screened for batch in batches if (screened := self._screened(batch)).places]
        if not batches:
            return
        parts = [batch.events() for batch in batches]
        events = parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
        verdicts = await desk.deliver(events)
        if verdicts.count(DELIVERED) == len(events):
            desk.gate.delivered(leave)
            for batch in batches:
                self._done(batch)
            return
        answers = iter(verdicts)
        for batch in batches:
            self._sort_out(batch, list(islice(answers, len(batch.places))), leave)

    def _done(self, batch: _Batch) -> None:
        if len(batch.places) == len(batch.chunk.events):
            self._desk.settling.done(batch.chunk)
        else:
            for place in batch.places:
                self._desk.settling.done(batch.chunk, place)

    def _sort_out(self, batch: _Batch, verdicts: Sequence[Verdict], leave: Pass) -> None:
        """Settle event by event; a key that becomes blocked takes its undelivered rest with it."""
        desk, chunk = self._desk, batch.chunk
        undone: list[int] = []
        for place, verdict in zip(batch.places, verdicts, strict=True):
            event = chunk.events[place]
            if isinstance(verdict, Delivered):
                desk.settling.done(chunk, place)
            elif event.key in desk.settling.blocked and desk.keyed(event):
                desk.park(chunk, place, "held")
            elif not desk.apply(chunk, place, verdict, leave):
                undone.append(place)
        if undone:
            self._undone.append(_Batch(batch.number, chunk, undone))
            self._filled.set()


class RequestDelivering:
    """For sinks of one request per event: many under way, one per key, none waited for longer than ``park_after``."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._queue: deque[tuple[Chunk, int]] = deque()
        self._followers: dict[str, deque[tuple[Chunk, int]]] = {}
        """The events that wait for an earlier one of their key, for every key that has a turn."""
        self._turns: deque[tuple[Chunk, int]] = deque()
        """The next event of each key whose previous one is done. They are older than the queue."""
        self._filled = asyncio.Event()
        self._under_way = 0

    @property
    def under_way(self) -> int:
        """Requests that are waited for: neither answered nor parked."""
        return self._under_way

    @property
    def sated(self) -> bool:
        """Whether as many events wait as may be under way at once."""
        return len(self._turns) + len(self._queue) >= self._desk.slots.limit

    def put(self, chunk: Chunk) -> None:
        """Deliver ``chunk``, each key in order."""
        self._queue.extend((chunk, index) for index in range(len(chunk.events)))
        self._filled.set()

    async def run(self) -> None:
        """Send what is put, until cancelled."""
        async with asyncio.TaskGroup() as requests:
            while True:
                while not (self._turns or self._queue):
                    self._filled.clear()
                    await self._filled.wait()
                await self._desk.gate.room()
                await self._desk.slots.acquire()
                was_sated = self.sated
                if not self._start(requests):
                    self._desk.slots.release()
                if was_sated and not self.sated:
                    self._desk.hungry()

    def _start(self, requests: asyncio.TaskGroup) -> bool:
        """Start a request for the next event; return False if it is set aside or waits for its key's turn."""
        if self._turns:
            chunk, index = self._turns.popleft()
        else:
            chunk, index = self._queue.popleft()
            if self._follows(chunk, index):
                return False
        if self._desk.set_aside(chunk, index):
            self._end_turn(chunk, index)
            return False
        requests.create_task(self._one(chunk, index))
        return True

    def _follows(self, chunk: Chunk, index: int) -> bool:
        """Let the event wait if an earlier one of its key has the turn; give its key the turn otherwise."""
        event = chunk.events[index]
        if event.key is None or not self._desk.keyed(event):
            return False
        if event.key in self._followers:
            self._followers[event.key].append((chunk, index))
            return True
        self._followers[event.key] = deque()
        return False

    def _end_turn(self, chunk: Chunk, index: int) -> None:
        """Give the turn to the next event of the key.

        Only to the next one: a pass over all that wait, for each event done, costs the square of their number, and a
        destination with a backlog of few keys would never catch up.
        """
        event = chunk.events[index]
        if event.key is None or event.key not in self._followers or not self._desk.keyed(event):
            return
        followers = self._followers[event.key]
        if followers:
            self._turns.append(followers.popleft())
            self._filled.set()
        else:
            del self._followers[event.key]

    async def _one(self, chunk: Chunk, index: int) -> None:
        under_way = await self._deliver(chunk, index)
        if not under_way:
            self._desk.slots.release()
        self._end_turn(chunk, index)

    async def _deliver(self, chunk: Chunk, index: int) -> bool:
        """Send the event until it is settled or parked; returns whether its request goes on, and keeps its slot.

        While the circuit is open the event stays in hand.
        """
        desk, event = self._desk, chunk.events[index]
        began = None
        while True:
            leave = await self._admitted()
            began = began or time.monotonic()
            request = asyncio.ensure_future(self._request(event))
            if await self._outlasts(request, began):
                self._park_under_way(chunk, index, request, leave, began)
                return True
            if desk.apply(chunk, index, request.result(), leave):
                return False
            if desk.gate.closed:
                if time.monotonic() - began >= desk.spec.park_after_seconds:
                    desk.park(chunk, index, "waiting", due_in=desk.spec.circuit.probe_seconds)
                    return False
                await asyncio.sleep(desk.spec.park_after_seconds / 4)
            else:
                began = None

    async def _admitted(self) -> Pass:
        """Leave to send, with a slot; one that is too many since the destination asked for less is given back first."""
        gate, slots = self._desk.gate, self._desk.slots
        while not (leave := await gate.admit()).probe and slots.overfull():
            slots.release()
            await slots.acquire()
        return leave

    async def _request(self, event: StoredEvent) -> Verdict:
        [verdict] = await self._desk.deliver([event])
        return verdict

    async def _outlasts(self, request: asyncio.Future[Verdict], began: float) -> bool:
        """Wait for ``request`` as long as it may be waited for; returns whether that was not enough."""
        left = max(0.0, began + self._desk.spec.park_after_seconds - time.monotonic())
        self._under_way += 1
        try:
            await asyncio.wait({request}, timeout=left)
        except asyncio.CancelledError:
            request.cancel()
            raise
        finally:
            self._under_way -= 1
        return not request.done()

    def _park_under_way(
        self, chunk: Chunk, index: int, request: asyncio.Future[Verdict], leave: Pass, began: float
    ) -> None:
        """The request goes on, the event becomes a row leased to it, and nothing waits for either any more."""
        desk, lease, event = self._desk, uuid4(), chunk.events[index]
        left = max(0.0, desk.sink.timeout_seconds - (time.monotonic() - began)) + LEASE_MARGIN_SECONDS
        number = desk.park(chunk, index, "waiting", due_in=0.0, claims=1, lease=lease, lease_for=left)
        verdict = self._after(number, request)
        try:
            desk.overdue(ClaimedRow(event, desk.keyed(event), 0, 1, lease), leave, verdict)
        except SessionReset:
            verdict.close()
            request.cancel()
            raise

    async def _after(self, number: int, request: asyncio.Future[Verdict]) -> Verdict:
        """The verdict of ``request``, once the row is in the database."""
        try:
            verdict = await request
        except asyncio.CancelledError:
            request.cancel()
            raise
        finally:
            self._desk.slots.release()
        await self._desk.settling.committed(number)
        return verdict


def delivering(desk: Desk) -> Delivering:
    """The way of delivering that fits the sink."""
    return BatchDelivering(desk) if desk.sink.keeps_order else RequestDelivering(desk)
