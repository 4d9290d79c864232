"""The order in which requests that wait for a limit come next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Source = Literal["log", "parked", "replay"]
"""The origin of a request: the log, a parked delivery, or a replay."""
ROUND: Final[tuple[Source, ...]] = ("log", "parked", "log", "replay")
"""The sources in turn. One that has no request is passed over."""


class Turn(NamedTuple):
    """A request that waits. ``granted`` gets the number of its events, of at most ``most``, that may be sent."""

    most: int
    granted: asyncio.Future[int]


class Turns:
    """The requests that wait, each source in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: Mapping[Source, deque[Turn]] = {source: deque() for source in ROUND}
        self._place = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def events(self) -> int:
        """The number of events that wait."""
        return sum(turn.most for waiting in self._waiting.values() for turn in waiting)

    def add(self, source: Source, most: int) -> Turn:
        """Add a request to the end of its source."""
        turn = Turn(most, asyncio.get_running_loop().create_future())
        self._waiting[source].append(turn)
        return turn

    def next(self) -> Turn:
        """Remove and return the next request. Raises ``LookupError`` without any."""
        for step in range(len(ROUND)):
            waiting = self._waiting[ROUND[(self._place + step) % len(ROUND)]]
            if waiting:
                self._place = (self._place + step + 1) % len(ROUND)
                return waiting.popleft()
        raise LookupError("nothing waits")

    def remove(self, source: Source, turn: Turn) -> None:
        """Remove a request that is cancelled, if it still waits."""
        if turn in self._waiting[source]:
            self._waiting[source].remove(turn)
