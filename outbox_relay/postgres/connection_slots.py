"""Slots for the relay's connections, so that slow statements of one caller do not starve the others.

Leases, chores and figures have one connection each; looks at the log have one outside of the pool. One of the others is
reserved for all remaining callers, and the sinks divide the rest equally. Without these limits, one sink whose
statements wait for a lock would take every connection, the relay's leases would not be renewed, and all other sinks
would stop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final

from outbox_relay.domain.errors import StatementFailed

LEASES: Final = "leases"
CHORES: Final = "chores"
FIGURES: Final = "figures"
ALONE: Final = frozenset({LEASES, CHORES, FIGURES})
"""Callers with a connection of their own, if there are at least ``FEWEST``."""
OTHER: Final = "other"
REPLAYS: Final = ":~"
"""The replays of a process. Together they have one connection, and take none of the share of a sink."""
FEWEST: Final = len(ALONE) + 2
"""Smallest number of connections at which callers are distinguished."""

caller: Final = ContextVar("caller", default=OTHER)
"""The caller of this task's statements: one of the names above, or the name of a sink after a colon."""


@contextmanager
def called_by(who: str) -> Generator[None]:
    """Count the statements of the block as those of ``who``."""
    token = caller.set(who)
    try:
        yield
    finally:
        caller.reset(token)


def sink_caller(sink: str) -> str:
    """Return the caller name of ``sink``."""
    return f":{sink}"


class ConnectionSlots:
    """The slots of one store. A call takes one before it requests a connection, and returns it with the connection."""

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._taken: Counter[str] = Counter()
        self._sinks: set[str] = set()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def taken(self, who: str, name: str, seconds: float) -> AsyncGenerator[None]:
        """Take a slot for the block.

        Raises ``StatementFailed`` if ``who`` gets none for its statement ``name`` within ``seconds``.
        """
        if who.startswith(":") and who != REPLAYS:
            self._sinks.add(who)
        if self._waiting or not self._free(who):
            await self._wait_for_slot(who, name, seconds)
        else:
            self._taken[who] += 1
        try:
            yield
        finally:
            self._taken[who] -= 1
            self._wake()

    async def _wait_for_slot(self, who: str, name: str, seconds: float) -> None:
        """Wait until a slot is free, and take it."""
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
        """Give free slots to the waiting callers, in order."""
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
        if who == REPLAYS:
            return self._taken[who] < 1
        return not who.startswith(":") or self._taken[who] < max(1, (shared - 1) // len(self._sinks))
