"""The calls that deliver the rows of one claim."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.relay.breaker import Permit


@dataclass(slots=True, eq=False)
class ClaimedCalls:
    """The calls of one claim that have not begun, which must begin before ``until`` and while ``permit`` holds.

    ``is_full`` is True if the claim found as many rows as it asked for.
    """

    rows: deque[list[ClaimedRow]]
    until: float
    permit: Permit
    is_full: bool = False
    left: int = field(init=False)
    """The number of rows whose calls have not begun."""
    given_back: bool = field(default=False, init=False)
    """True if rows went back without a call."""
    _few: int = field(default=0, init=False)
    _few_left: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        """Count the rows."""
        self.left = sum(map(len, self.rows))

    def next(self) -> list[ClaimedRow]:
        """Return the rows of the next call; none if every call has begun."""
        rows = self.rows.popleft() if self.rows else []
        self.left -= len(rows)
        if self.left <= self._few:
            self._few_left.set()
        return rows

    async def wait_until_few(self, few: int) -> None:
        """Wait until at most ``few`` rows are left. One task waits."""
        self._few = few
        if self.left > few:
            await self._few_left.wait()

    def give_back(self) -> Sequence[list[ClaimedRow]]:
        """Return the rows of the calls that have not begun, and let none of them begin any more."""
        rows, self.rows, self.left = self.rows, deque(), 0
        self.given_back = bool(rows)
        self._few_left.set()
        return rows
