"""Periodic chores of every relay: create partitions in advance, remove outranked ledger rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import RelayError, StatementFailed
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.connection_slots import CHORES, caller
from outbox_relay.postgres.store import Store

LOOK_SECONDS = 1.0
LEISURE = 50
"""A chore is done again after this many times as long as it took, at least: it costs 2 % of the time at most."""
LEISURE_BEHIND = 1
"""The same for one that has left much: it costs half of the time of the chores' connection at most."""
TRIM_ROWS, TRIM_LEAST = 1000, 200
"""Rows of each sink that one trim looks at, fewer after one that failed: at most 64 of them are not outranked."""


@dataclass(slots=True)
class Chore:
    """Something to do every ``every_seconds``; again after ``retry_seconds`` when the database refused.

    ``is_behind`` says by what it counted whether it has left much, so that it is done again soon.
    """

    name: str
    work: Callable[[], Awaitable[int]]
    every_seconds: float
    retry_seconds: float
    is_behind: Callable[[int], bool] = lambda _: False
    due_at: float = 0.0


class LedgerTrim:
    """Trims the ledger in steps that come to their end, and says when it grows faster than that."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows = TRIM_ROWS

    async def trim(self) -> int:
        """Remove outranked rows of every sink; returns how many. Looks at fewer after a trim that failed."""
        try:
            count = await self._store.trim_progress(self._rows)
        except StatementFailed:
            self._rows = TRIM_LEAST
            raise
        self._rows = min(TRIM_ROWS, self._rows + TRIM_LEAST)
        return count

    def is_behind(self, count: int) -> bool:
        """Return whether so many removed rows say that some sink has more of them."""
        return count >= TRIM_LEAST // 2


class Housekeeping:
    """The chores of one relay process. Every relay does them; each leaves nothing for the next."""

    def __init__(self, store: Store, log: BoundLogger) -> None:
        self._log = log
        self._seldom = RateLimitedLog(log)
        ledger = LedgerTrim(store)
        self._chores = [
            Chore("make partitions", store.make_partitions, 60.0, 2.0),
            Chore("trim the ledger", ledger.trim, 5.0, 15.0, ledger.is_behind),
            Chore("trim relays", store.trim_relays, 600.0, 60.0),
        ]

    async def run(self) -> None:
        """Do what is due, until cancelled. A chore that fails is due again; it never ends the others."""
        caller.set(CHORES)
        while True:
            for chore in self._chores:
                if chore.due_at <= time.monotonic():
                    await self._do(chore)
            await asyncio.sleep(LOOK_SECONDS)

    async def _do(self, chore: Chore) -> None:
        """Do one chore; one that fails, for whatever reason of the database, is tried again later."""
        began = time.monotonic()
        try:
            count = await chore.work()
        except RelayError as error:
            chore.due_at = self._next(began, chore.retry_seconds)
            self._seldom.warning(f"housekeeping will try again: {chore.name}", reason=str(error))
            return
        behind = chore.is_behind(count)
        chore.due_at = self._next(began, 0.0, LEISURE_BEHIND) if behind else self._next(began, chore.every_seconds)
        if count:
            self._log.debug("housekeeping", chore=chore.name, count=count)

    @staticmethod
    def _next(began: float, seconds: float, leisure: int = LEISURE) -> float:
        now = time.monotonic()
        return now + max(seconds, leisure * (now - began))
