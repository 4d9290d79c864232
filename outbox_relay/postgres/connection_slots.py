"""Shares of the relay's connections: slow statements of one caller do not starve the others.

Ticks, leases and chores have a connection each. The sinks share what is left in equal parts, less one for everything
else. Without these bounds one sink whose statements wait for a lock takes every connection, the relay's leases are not
renewed, and all other sinks stop too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

from outbox_relay.domain.errors import StatementFailed

TICKS: Final = "ticks"
LEASES: Final = "leases"
CHORES: Final = "chores"
ALONE: Final = frozenset({TICKS, LEASES, CHORES})
"""Callers with one connection of their own, where there are enough for that."""
OTHER: Final = "other"
FEWEST: Final = len(ALONE) + 2
"""Connections from which on callers are told apart."""

caller: Final = ContextVar("caller", default=OTHER)
"""For whom the statements of this task are: one of the names above, or the name of a sink after a colon."""


def sink_caller(sink: str) -> str:
    """Return the caller's name for the statements of ``sink``."""
    return f":{sink}"


class ConnectionSlots:
    """The slots of one store: taken before a connection is asked for, given back with it."""

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._taken: Counter[str] = Counter()
        self._sinks: set[str] = set()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def taken(self, who: str, name: str, seconds: float) -> AsyncGenerator[None]:
        """Hold a slot inside the block.

        Raises ``StatementFailed`` when ``who`` gets none for its statement ``name`` within ``seconds``.
        """
        if who.startswith(":"):
            self._sinks.add(who)
        if self._waiting or not self._free(who):
            await self._turn(who, name, seconds)
        else:
            self._taken[who] += 1
        try:
            yield
        finally:
            self._taken[who] -= 1
            self._wake()

    async def _turn(self, who: str, name: str, seconds: float) -> None:
        """Wait for a slot, which is then taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((who, turn))
        self._wake()
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._taken[who] -= 1
            self._waiting = [waiting for waiting in self._waiting if waiting[1] is not turn]
            self._wake()
            if isinstance(error, TimeoutError):
                raise StatementFailed(
                    f"statement {name} had to wait: every connection that it may use was busy for {seconds:g} s",
                    StatementFailed.NO_CONNECTION,
                ) from None
            raise

    def _wake(self) -> None:
        """Give free slots to those who wait, in turn."""
        for waiting in list(self._waiting):
            who, turn = waiting
            if self._free(who):
                self._waiting.remove(waiting)
                if not turn.done():
                    self._taken[who] += 1
                    turn.set_result(None)

    def _free(self, who: str) -> bool:
        if self._connections < FEWEST:
            return self._taken.total() < self._connections
        if who in ALONE:
            return self._taken[who] < 1
        shared = self._connections - len(ALONE)
        if sum(count for name, count in self._taken.items() if name not in ALONE) >= shared:
            return False
        return not who.startswith(":") or self._taken[who] < max(1, (shared - 1) // len(self._sinks))
