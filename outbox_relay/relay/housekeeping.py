"""Periodic chores of every relay, such as making partitions in advance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import RelayError, StatementFailed
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.connection_slots import CHORES, caller
from outbox_relay.postgres.store import Store

LOOK_SECONDS = 1.0
"""Interval at which due chores are looked for."""
LEISURE = 50
"""Minimum pause after a chore, as a multiple of its duration. A chore takes at most 2 % of the time."""
LEISURE_BEHIND = 1
"""The same for a chore that is behind. It takes at most half of the time of the chores' connection."""
TRIM_ROWS, TRIM_LEAST = 1000, 200
"""Rows of each sink that one trim examines, and fewer after a trim that failed. At most 64 of them are kept."""
MOST_LEASE_SECONDS = 600.0
"""The largest ``lease_seconds`` of a relay."""
KEYS = 500
"""Unique keys to look at, at a time."""


def _is_half_full(count: int) -> bool:
    """Return True if ``count`` done ones of ``KEYS`` that were looked at make more of them likely."""
    return count >= KEYS // 2


@dataclass(slots=True)
class Chore:
    """A periodic chore.

    It is done every ``every_seconds``, and ``retry_seconds`` after a failure. ``is_behind`` returns True for a count
    that shows that much work is left, so that the chore is repeated soon.
    """

    name: str
    work: Callable[[], Awaitable[int]]
    every_seconds: float
    retry_seconds: float
    is_behind: Callable[[int], bool] = lambda _: False
    due_at: float = 0.0

    def succeed(self, began: float, count: int) -> None:
        """Set the next due time after a success.

        ``began`` is the ``time.monotonic()`` value at which the chore began.
        """
        if self.is_behind(count):
            self._wait(began, 0.0, LEISURE_BEHIND)
        else:
            self._wait(began, self.every_seconds, LEISURE)

    def fail(self, began: float) -> None:
        """Set the next due time after the chore has failed."""
        self._wait(began, self.retry_seconds, LEISURE)

    def _wait(self, began: float, seconds: float, leisure: int) -> None:
        now = time.monotonic()
        self.due_at = now + max(seconds, leisure * (now - began))


class LedgerTrim:
    """Removes outranked positions in bounded steps.

    It detects that their number grows faster than they are removed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows = TRIM_ROWS

    async def trim(self) -> int:
        """Remove outranked positions of every sink, and return their number.

        Fewer rows are examined after a trim that failed.
        """
        try:
            count = await self._store.trim_progress(self._rows)
        except StatementFailed:
            self._rows = TRIM_LEAST
            raise
        self._rows = min(TRIM_ROWS, self._rows + TRIM_LEAST)
        return count

    def is_behind(self, count: int) -> bool:
        """Return True if a trim that removed ``count`` rows probably left more of them."""
        return count >= TRIM_LEAST // 2


class Housekeeping:
    """The chores of one relay process. Every relay does all of them, and ``more`` of its own."""

    def __init__(self, store: Store, log: BoundLogger, *more: Chore) -> None:
        self._log = log
        self._seldom = RateLimitedLog(log)
        ledger = LedgerTrim(store)
        self._chores = [
            Chore("make partitions", store.make_partitions, 60.0, 2.0),
            Chore("make partitions of attempts", store.make_attempt_partitions, 60.0, 2.0),
            Chore("trim the ledger", ledger.trim, 5.0, 15.0, ledger.is_behind),
            Chore("raise the starts of ledgers", store.raise_ledger_starts, 60.0, 60.0, bool),
            Chore("trim positions of former sinks", partial(store.trim_former_positions, TRIM_ROWS), 600.0, 60.0, bool),
            Chore("trim relays", store.trim_relays, 600.0, 60.0),
            Chore("cap times", partial(store.cap_times, MOST_LEASE_SECONDS), 60.0, 60.0),
            Chore("trim the history of routes", store.trim_routes, 60.0, 60.0, bool),
            Chore("trim marks of discarded events", partial(store.trim_discarded, TRIM_ROWS), 600.0, 60.0, bool),
            Chore("trim the history", partial(store.trim_history, TRIM_ROWS), 600.0, 60.0, bool),
            Chore("finish unique keys", partial(store.finish_unique_keys, KEYS), 1.0, 2.0, _is_half_full),
            *more,
        ]

    async def run(self) -> None:
        """Do chores when they are due, until cancelled.

        A chore that fails is repeated and does not stop the others.
        """
        caller.set(CHORES)
        while True:
            for chore in self._chores:
                if chore.due_at <= time.monotonic():
                    await self._do(chore)
            await asyncio.sleep(LOOK_SECONDS)

    async def _do(self, chore: Chore) -> None:
        """Do one chore, and set its next due time. A chore that fails is repeated later."""
        began = time.monotonic()
        try:
            count = await chore.work()
        except RelayError as error:
            chore.fail(began)
            self._seldom.warning("housekeeping.failed", chore=chore.name, reason=str(error))
            return
        chore.succeed(began, count)
        if count:
            self._log.debug("housekeeping.done", chore=chore.name, count=count)
