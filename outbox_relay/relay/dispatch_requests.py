"""Delivery of single events, for sinks of one request per event."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from datetime import timedelta

from outbox_relay.domain.in_flight import Chunk
from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.context import LEASE_MARGIN_SECONDS, CallResult, DeliveryContext
from outbox_relay.relay.row_leases import new_row_lease
from outbox_relay.relay.shared_limits import UNLIMITED, Admission
from outbox_relay.relay.slow_requests import SlowRequest, SlowRequests

RESUME_SECONDS = 0.1
"""Interval at which keys are looked at that wait while the destination may be down."""


class RequestDispatcher:
    """Sends many requests at once, one for each key.

    Each is waited for at most ``park_after_seconds``.

    Slower requests become parked deliveries by way of ``slow_requests``. ``want_more`` is set when fewer events wait
    than may be in flight.
    """

    def __init__(self, context: DeliveryContext, want_more: asyncio.Event, slow_requests: SlowRequests) -> None:
        self._context = context
        self._want_more = want_more
        self._slow_requests = slow_requests
        self._queue: deque[tuple[Chunk, int]] = deque()
        self._followers: dict[str, deque[tuple[Chunk, int]]] = {}
        """The events that wait for an earlier one of their key, for every key that has a turn."""
        self._turns: deque[tuple[Chunk, int]] = deque()
        """The next event of each key whose previous one is done. They are older than the queue."""
        self._filled = asyncio.Event()
        self._under_way = 0
        self._stopped: list[str] = []
        """Blocked keys whose next event, the first of its followers, waits while the destination may be down."""
        self._turn = asyncio.Lock()

    @property
    def under_way(self) -> int:
        """The number of requests that are neither answered nor parked."""
        return self._under_way

    @property
    def saturated(self) -> bool:
        """True while as many events wait as may be in flight at once."""
        return len(self._turns) + len(self._queue) >= self._context.limiter.limit

    def put(self, chunk: Chunk) -> None:
        """Deliver ``chunk``, each key in order."""
        self._queue.extend((chunk, index) for index in range(len(chunk.events)))
        self._filled.set()

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with asyncio.TaskGroup() as requests:
            while True:
                while not (self._turns or self._queue):
                    self._filled.clear()
                    await self._filled.wait()
                await self._context.parked_limit.wait_for_capacity()
                self._context.limiter.log_flows()
                await self._context.limiter.acquire()
                was_saturated = self.saturated
                if not self._start(requests):
                    self._context.limiter.release()
                if was_saturated and not self.saturated:
                    self._want_more.set()

    def _start(self, requests: asyncio.TaskGroup) -> bool:
        """Start a request for the next event.

        Return False if it was parked or waits for its key's turn.
        """
        if self._turns:
            chunk, index = self._turns.popleft()
        else:
            chunk, index = self._queue.popleft()
            if self._follows(chunk, index):
                return False
        event = chunk.events[index]
        if event.key is not None and self._context.must_wait(event):
            self._followers[event.key].appendleft((chunk, index))
            if not self._stopped:
                requests.create_task(self._resume())
            self._stopped.append(event.key)
            return False
        if self._context.park_unless_deliverable(chunk, index):
            self._end_turn(chunk, index)
            return False
        requests.create_task(self._take_turn(chunk, index))
        return True

    def _follows(self, chunk: Chunk, index: int) -> bool:
        """Queue the event if an earlier one of its key has the turn.

        Otherwise give its key the turn.
        """
        event = chunk.events[index]
        if event.key is None or not self._context.keyed(event):
            return False
        if event.key in self._followers:
            self._followers[event.key].append((chunk, index))
            return True
        self._followers[event.key] = deque()
        return False

    def _end_turn(self, chunk: Chunk, index: int) -> None:
        """Give the turn to the next event of the key.

        A pass over all waiting events would cost the square of their number, and a destination with a backlog of few
        keys would never catch up.
        """
        event = chunk.events[index]
        if event.key is None or event.key not in self._followers or not self._context.keyed(event):
            return
        followers = self._followers[event.key]
        if followers:
            self._turns.append(followers.popleft())
            self._filled.set()
        else:
            del self._followers[event.key]

    async def _resume(self) -> None:
        """Give stopped keys their turn once the destination is not down, or once their rows are gone."""
        context = self._context
        while self._stopped:
            await asyncio.sleep(RESUME_SECONDS)
            stopped, self._stopped = self._stopped, []
            for key in stopped:
                chunk, index = self._followers[key][0]
                if context.must_wait(chunk.events[index]):
                    self._stopped.append(key)
                else:
                    self._turns.append(self._followers[key].popleft())
                    self._filled.set()

    async def _take_turn(self, chunk: Chunk, index: int) -> None:
        """Deliver the event, and release its slot unless a slow request keeps it."""
        slow = await self._deliver(chunk, index)
        if not slow:
            self._context.limiter.release()
        self._end_turn(chunk, index)

    async def _deliver(self, chunk: Chunk, index: int) -> bool:
        """Send the event until it is settled or parked.

        Return True if its request is still in flight.

        An event that is unavailable stays in flight while the circuit is open, or while the destination answers
        nothing. If it answers other events, this one becomes a row, so that no position waits for it.
        """
        context, event = self._context, chunk.events[index]
        began = unavailable_since = None
        while True:
            permit, admission = await self._admitted()
            sent = time.monotonic()
            began = began or sent
            request = asyncio.ensure_future(context.deliver([event]))
            if admission is not UNLIMITED:
                request.add_done_callback(admission.end)
            if await self._outlasts(request, sent):
                self._park_slow(chunk, index, request, permit, sent)
                return True
            [verdict], seconds = request.result()
            if context.apply(chunk, index, verdict, permit, seconds):
                return False
            if not context.breaker.closed:
                began = unavailable_since = None
                await self._wait_without_slot(0.0)
                continue
            answers_others = unavailable_since not in (None, context.breaker.unavailable_since)
            if answers_others and time.monotonic() - began >= context.spec.park_after_seconds:
                context.park(chunk, index, "waiting", due_in=context.spec.circuit.probe_seconds)
                return False
            unavailable_since = unavailable_since or context.breaker.unavailable_since
            await self._wait_without_slot(context.breaker.retry_delay())

    async def _wait_without_slot(self, seconds: float) -> None:
        """Wait, and let other events have the slot meanwhile: they show whether the destination answers at all.

        If it does, the wait ends ``probe_seconds`` later: positions wait for this event.
        """
        limiter, breaker = self._context.limiter, self._context.breaker
        limiter.release()
        await asyncio.sleep(0)
        until, since = time.monotonic() + seconds, breaker.unavailable_since
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, RESUME_SECONDS))
            if breaker.unavailable_since != since:
                since = breaker.unavailable_since
                until = min(until, time.monotonic() + self._context.spec.circuit.probe_seconds)
        await limiter.acquire()

    async def _admitted(self) -> tuple[Permit, Admission]:
        """Wait for the circuit, then for the limits of all relays, with a slot of this relay.

        A slot above the limit is released first.
        """
        breaker, limiter, limits = self._context.breaker, self._context.limiter, self._context.limits
        while True:
            while not (permit := await self._admit()).probe and limiter.over_limit():
                limiter.release()
                await limiter.acquire()
            if not limits.active:
                return permit, UNLIMITED
            admission = await self._context.admit("log")
            if (permit.probe or breaker.holds(permit)) and not breaker.handing_over:
                return permit, admission
            limits.withdraw(admission)

    async def _admit(self) -> Permit:
        """Wait for the circuit. Only the first event competes for a probe with the rows, which are older."""
        if (permit := self._context.breaker.admit_at_once()) is not None:
            return permit
        async with self._turn:
            return await self._context.breaker.admit()

    async def _outlasts(self, request: asyncio.Future[CallResult], sent: float) -> bool:
        """Wait for ``request`` until ``park_after_seconds`` have passed.

        Return True if it is still in flight.
        """
        left = max(0.0, sent + self._context.spec.park_after_seconds - time.monotonic())
        self._under_way += 1
        try:
            await asyncio.wait({request}, timeout=left)
        except asyncio.CancelledError:
            request.cancel()
            raise
        finally:
            self._under_way -= 1
        return not request.done()

    def _park_slow(
        self, chunk: Chunk, index: int, request: asyncio.Future[CallResult], permit: Permit, sent: float
    ) -> None:
        """Make the event a row leased to its request: no position waits for it.

        Raises ``SessionReset`` if the session is ending.
        """
        context, event, waited = self._context, chunk.events[index], time.monotonic() - sent
        lease = new_row_lease(context.now() - timedelta(seconds=waited))
        left = max(0.0, context.sink.timeout_seconds - waited) + LEASE_MARGIN_SECONDS
        number = context.park(chunk, index, "waiting", due_in=0.0, claims=1, lease=lease, lease_for=left)
        row = ClaimedRow(event, context.keyed(event), 0, 1, lease)
        self._slow_requests.adopt_slow_request(SlowRequest(row, permit, number, request))
