"""The number of requests of a sink that may be under way at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class ConcurrencyLimiter:
    """How many requests of a sink may be under way at once: up to ``most``, and fewer for a while after it asked.

    Halved when the destination asks for less; raised by one whenever as many as fit were delivered. ``changed`` is
    given the limit whenever it changes, nothing when it is ``most`` again.
    """

    def __init__(self, most: int, changed: Callable[[int | None], None] = lambda _: None) -> None:
        self._most = float(most)
        self._bears = float(most)
        self._changed = changed
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Requests that may be under way now."""
        return int(self._bears)

    def full(self) -> bool:
        """Whether the next one has to wait."""
        return self._taken >= self.limit

    def over_limit(self) -> bool:
        """Whether more are taken than may be now: who has not begun should give his back."""
        return self._taken > self.limit

    async def acquire(self) -> None:
        """Wait for room for a request, which whoever takes it gives back by ``release``."""
        while self.full():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()
                raise
        self._taken += 1

    def release(self) -> None:
        """A request has ended."""
        self._taken -= 1
        self._wake()

    def decrease(self) -> None:
        """The destination asked for less."""
        self._set(max(1.0, self._bears / 2))

    def increase(self) -> None:
        """A request was delivered."""
        if self._bears < self._most:
            self._set(min(self._most, self._bears + 1.0 / self._bears))
            self._wake()

    def _set(self, bears: float) -> None:
        before, self._bears = self.limit, bears
        if self.limit != before:
            self._changed(self.limit if bears < self._most else None)

    def _wake(self) -> None:
        vacant = self.limit - self._taken
        while vacant > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                vacant -= 1
