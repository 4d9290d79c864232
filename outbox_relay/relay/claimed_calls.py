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
    given_back: bool = False
    half_begun: asyncio.Event = field(default_factory=asyncio.Event)
    _half: int = field(init=False)

    def __post_init__(self) -> None:
        self._half = len(self.rows) // 2

    def next(self) -> list[ClaimedRow]:
        """Return the rows of the next call; none if every call has begun."""
        if len(self.rows) <= self._half:
            self.half_begun.set()
        return self.rows.popleft() if self.rows else []

    def give_back(self) -> Sequence[list[ClaimedRow]]:
        """Return the rows of the calls that have not begun, and let none of them begin any more."""
        left, self.rows = self.rows, deque()
        self.given_back = bool(left)
        self.half_begun.set()
        return left
