"""The limit of concurrent requests, which adapts to the destination."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

PARKED_SHARE = 4
"""Parked deliveries take one slot in this number while the log flows. A wave of their requests delays new events."""
FLOW_SECONDS = 1.0
"""Time after the last event of the log during which the log counts as flowing."""


class _Slots:
    """The slots that are taken, and the requests that wait for one: those of all sessions that share them."""

    __slots__ = ("_limit", "_waiting", "sessions", "taken")

    def __init__(self) -> None:
        self.taken = self.sessions = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._limit: Callable[[], int] = lambda: 0
        """The limit of the newest session, which counts for those that wait."""

    def join(self, limit: Callable[[], int]) -> None:
        """Count a session, whose ``limit`` is the newest."""
        self.sessions += 1
        self._limit = limit
        self.wake()

    def leave(self) -> None:
        """Count a session less."""
        self.sessions -= 1

    def turn(self) -> asyncio.Future[None]:
        """Return a future that ends when a slot may be free, after those of earlier calls."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        return turn

    def take(self) -> None:
        """Count a slot that is taken."""
        self.taken += 1

    def release(self) -> None:
        """Count a slot less."""
        self.taken -= 1
        self.wake()

    def wake(self) -> None:
        """Let as many requests look for a slot as there are vacant ones."""
        vacant = self._limit() - self.taken
        while vacant > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                vacant -= 1


class ConcurrencyLimiter:
    """The slots for concurrent requests of one sink.

    There are ``maximum`` slots. The limit is halved when the destination throttles, and raised by one whenever as many
    requests were delivered as it allows. ``changed`` is set when the limit changes.

    The limiter of a session that follows that of ``before`` shares its slots: its requests keep theirs until they end.
    """

    def __init__(self, maximum: int, changed: asyncio.Event, before: ConcurrencyLimiter | None = None) -> None:
        self._maximum = float(maximum)
        self._current = float(maximum)
        self._changed = changed
        self._slots = _Slots() if before is None else before._slots
        self._flowed_at = float("-inf")
        self._slots.join(lambda: self.limit)

    @property
    def taken(self) -> int:
        """The number of slots that are taken, by all sessions."""
        return self._slots.taken

    @property
    def shared(self) -> bool:
        """True while several sessions use the slots."""
        return self._slots.sessions > 1

    def leave(self) -> None:
        """End the use by this session, whose requests have ended."""
        self._slots.leave()

    @property
    def limit(self) -> int:
        """The number of requests that may be in flight now."""
        return int(self._current)

    @property
    def reduced_limit(self) -> int | None:
        """The current limit; None means the maximum."""
        return self.limit if self._current < self._maximum else None

    @property
    def free(self) -> int:
        """The number of slots that may be taken now."""
        return max(0, self.limit - self._slots.taken)

    def full(self) -> bool:
        """Return True if the next request has to wait."""
        return self._slots.taken >= self.limit

    def over_limit(self) -> bool:
        """Return True if more slots are taken than the limit allows since it decreased.

        A request that has not begun should then release its slot.
        """
        return self._slots.taken > self.limit

    def log_flows(self) -> None:
        """Record that an event of the log asks for a slot."""
        self._flowed_at = time.monotonic()

    @property
    def flows(self) -> bool:
        """True if an event of the log asked for a slot a moment ago."""
        return time.monotonic() - self._flowed_at < FLOW_SECONDS

    def parked_share(self) -> int:
        """Return the number of slots that parked deliveries may take now."""
        return max(1, self.limit // PARKED_SHARE) if self.flows else self.limit

    async def acquire(self) -> None:
        """Wait for a slot. The caller releases it."""
        while self.full():
            try:
                await self._slots.turn()
            except asyncio.CancelledError:
                self._slots.wake()
                raise
        self._slots.take()

    def release(self) -> None:
        """Release a slot."""
        self._slots.release()

    def decrease(self) -> None:
        """Halve the limit, since the destination throttles."""
        self._set(max(1.0, self._current / 2))

    def increase(self) -> None:
        """Raise the limit by a fraction of one, since a request was delivered."""
        if self._current < self._maximum:
            self._set(min(self._maximum, self._current + 1.0 / self._current))
            self._slots.wake()

    def _set(self, current: float) -> None:
        before, self._current = self.limit, current
        if self.limit != before:
            self._changed.set()
