"""The requests in flight of one sink, whose number all relays share.

A request in flight has a slot. Slots are leased in the database, for longer than a request lasts: those of a relay that
crashed become free when none of its requests can be in flight. This process measures the lease by its own
``lease_clock``, from *before* each statement was sent. It sends no new request that could last longer than its slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.store import Store
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.turns import Source, Turns

MARGIN_SECONDS = 2.0
"""Time by which a lease outlasts the requests that began before the relay stopped to send."""
WAIT_SECONDS = 0.1
"""Interval between two statements while requests wait for slots."""
HOLD_SECONDS = 0.5
"""Interval between two statements while this relay has slots, so that it sees whether others want them."""
IDLE_SECONDS = 1.0
"""Time for which slots are kept that are not used."""
STARVED_SECONDS = 1.0
"""Time without a slot after which shards are handed over with events in flight."""
LEAST_SECONDS = 0.02
"""Shortest interval between two statements."""
STATEMENT_SECONDS = 3.0
"""Time limit of a statement."""


class SharedSlots:
    """The slots of one sink in this relay. ``leases`` has their number for all relays, and the name of the sink."""

    def __init__(self, store: Store, relay: UUID, leases: SinkLeases, lease_seconds: float, log: BoundLogger) -> None:
        self._store = store
        self._relay = relay
        self._leases = leases
        self._lease_seconds = lease_seconds
        self._believed = lease_seconds - min(1.0, lease_seconds / 10)
        self._log = RateLimitedLog(log)
        self._turns = Turns()
        self._changed = asyncio.Event()
        self._slots = 0
        self._quota = 0
        self._used = 0
        self._calls = 0
        self._request_seconds = 0.0
        self._until = self._leased_until = float("-inf")
        self._deadlines: list[Callable[[], Mapping[int, float]]] = []
        self._peak, self._peak_at = 0, float("-inf")
        self._served_at = float("-inf")

    @property
    def total(self) -> int | None:
        """The number of requests in flight of all relays, or None."""
        return self._leases.limits.max_in_flight_total

    @property
    def free(self) -> int:
        """The number of slots in which a request can begin now. Those above the fair share are given up instead."""
        return max(0, min(self._slots, self._quota) - self._used) if lease_clock() < self._until else 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._turns)

    @property
    def starved(self) -> bool:
        """True if requests have waited for a while, and this relay has no slot."""
        return bool(self._turns) and not self._used and time.monotonic() - self._served_at > STARVED_SECONDS

    @property
    def valid(self) -> bool:
        """True if a request may begin in a slot that was taken."""
        return self._used <= self._slots and lease_clock() < self._until

    @property
    def until(self) -> float:
        """The ``lease_clock()`` value until which requests may begin."""
        return self._until

    @property
    def leased_until(self) -> float:
        """The ``lease_clock()`` value at which the slots end of requests that last longer than planned."""
        return self._leased_until if self.total is not None else float("inf")

    @contextlib.contextmanager
    def outlasting(self, deadlines: Callable[[], Mapping[int, float]]) -> Generator[None]:
        """Lease the slots for longer than the ``deadlines`` of requests that may last longer than planned."""
        self._deadlines.append(deadlines)
        try:
            yield
        finally:
            self._deadlines.remove(deadlines)

    async def take(self, source: Source, request_seconds: float) -> bool:
        """Wait for a slot for a request of at most ``request_seconds``.

        Return False if none is needed. The caller gives a slot back when the request has ended.
        """
        if self.total is None:
            return False
        if request_seconds > self._request_seconds:
            self._request_seconds, self._until = request_seconds, float("-inf")
        if not self._turns and self.free:
            self._use()
            self._observe()
            return True
        if not self._turns:
            self._served_at = time.monotonic()
        turn = self._turns.add(source, 1)
        self._observe()
        self._changed.set()
        try:
            return await turn.granted > 0
        except asyncio.CancelledError:
            self._turns.remove(source, turn)
            if turn.granted.done() and not turn.granted.cancelled() and turn.granted.result():
                self.give_back()
            raise

    def give_back(self) -> None:
        """Return a slot whose request has ended."""
        self._used -= 1
        self._serve()
        if self._slots > self._quota:
            self._changed.set()

    def _observe(self) -> None:
        """Keep the largest number of slots that was wanted within ``IDLE_SECONDS``."""
        wanted, now = self._used + len(self._turns), time.monotonic()
        if wanted >= self._peak or now - self._peak_at > IDLE_SECONDS:
            self._peak, self._peak_at = wanted, now

    def _serve(self) -> None:
        while self._turns and self.free:
            turn = self._turns.next()
            if not turn.granted.done():
                self._use()
                turn.granted.set_result(1)

    def _use(self) -> None:
        self._used += 1
        self._served_at = time.monotonic()

    def _serve_all(self) -> None:
        """Let every request begin without a slot, since the limit was removed."""
        while self._turns:
            turn = self._turns.next()
            if not turn.granted.done():
                turn.granted.set_result(0)

    # -- the database -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take, renew and give up slots, until cancelled. Raises ``DatabaseUnavailable``."""
        while True:
            await self._wait()
            if self.total is None:
                self._serve_all()
                self._slots = 0
                continue
            try:
                await self._tend()
            except StatementFailed as error:
                self._log.warning("slots.not_renewed", sink=self._leases.sink, reason=str(error))
            await asyncio.sleep(LEAST_SECONDS)

    async def _wait(self) -> None:
        """Wait until slots are wanted, or are to be renewed or given up."""
        interval = WAIT_SECONDS if self._turns else HOLD_SECONDS if self._slots or self._used else None
        try:
            async with asyncio.timeout(interval):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    async def _tend(self) -> None:
        """Say how many slots are wanted, and take over how many there are.

        Until the answer no more are used than ``kept``. This relay has these slots whether or not the statement has an
        effect.
        """
        self._observe()
        wanted = min(self._peak, (self.total or 0) + 1)  # one more shows that requests wait
        self._slots = kept = max(self._used, min(self._slots, self._quota, wanted))
        self._calls += 1
        sent, request_seconds = lease_clock(), self._request_seconds
        ends = (end for deadlines in self._deadlines for end in deadlines().values())
        lease = max(self._lease_seconds + request_seconds, max(ends, default=sent) - sent) + MARGIN_SECONDS
        answer = await self._store.tend_slots(
            *(self._leases.current_name, self._relay, self._calls, wanted, kept, lease), STATEMENT_SECONDS
        )
        if answer is None:
            self._slots = self._quota = 0
            return
        self._slots, self._quota = answer
        self._leased_until = sent + lease - (self._lease_seconds - self._believed)
        if request_seconds >= self._request_seconds:
            self._until = sent + self._believed
        self._serve()

    async def leave(self) -> None:
        """Give up the slots that are not in use, since this relay leaves the sink.

        The last statement may have had an effect without an answer, so this relay may have more than it knows.
        """
        if self._calls and self.total is not None:
            self._peak, self._peak_at = self._used, time.monotonic()
            await self._tend()
