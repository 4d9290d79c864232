"""Look for schedules in the background while the page is used, which links to them only if there are any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outbox_relay.domain.errors import RelayError
from outbox_relay.postgres.store import Store

FRESH_SECONDS = 30.0
"""Age of a look from which on the next page looks again."""
LOOK_SECONDS = 2.0
"""Time limit of a look."""


class SchedulePresence:
    """The newest answer. Only one look runs at a time, and no page waits for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found = False
        self._at = float("-inf")
        self._running: asyncio.Task[None] | None = None

    def current(self, store: Store) -> bool:
        """Return True if there was a schedule at the last look. Begin to look again if that is old."""
        is_old = self._clock() - self._at > FRESH_SECONDS
        if is_old and (self._running is None or self._running.done()):
            self._running = asyncio.create_task(self.look(store), name="schedules")
        return self._found

    async def look(self, store: Store) -> None:
        """Ask the database. An answer that does not come leaves the last one."""
        try:
            [row] = await store.named("has_schedules", {}, LOOK_SECONDS)
            self._found = row.found
        except RelayError:
            pass
        self._at = self._clock()

    async def finish(self) -> None:
        """Wait until the present look has ended."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def close(self) -> None:
        """Cancel the present look."""
        if self._running is not None:
            self._running.cancel()
            await self.finish()
