"""The schedules of one relay process: it registers those of its file, and fires all that the database has.

Every relay looks at every schedule. The database compares and emits in one transaction, so each time is emitted once,
whichever relay comes first. This process's own clock decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from structlog.stdlib import BoundLogger

from outbox_relay.domain.cron import firing, next_time
from outbox_relay.domain.errors import DatabaseUnusable, StatementFailed
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.schedule_statements import ScheduleRow
from outbox_relay.postgres.store import Store

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""Longest pause between two looks at the schedules."""
PAUSE_SECONDS = 0.05
"""Shortest pause: another relay may have a schedule locked, or a time may be a moment away."""
SOON = frozenset({"again", "early", "emitted", "passed over"})
"""Outcomes after which the schedule may have another time that is due."""
FAILURES = (StatementFailed, DatabaseUnusable, ValueError)
"""Errors that concern one schedule, and no other."""


class Schedules:
    """The schedules of one relay. ``wanted`` are those of its file, as ``register_schedules`` takes them."""

    def __init__(self, store: Store, wanted: Sequence[Mapping[str, Any]], log: BoundLogger) -> None:
        self._store = store
        self._wanted = wanted
        self._log = log
        self._seldom = RateLimitedLog(log)
        self.registered = False
        """True once the database has the schedules of the file."""
        self._changed = asyncio.Event()

    def use(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        """Register the schedules of a reload as soon as possible, also those that are as before: one may be removed."""
        self._wanted = wanted
        self.registered = False
        self._changed.set()

    async def run(self) -> None:
        """Register and fire schedules until cancelled. Raises ``DatabaseUnavailable``."""
        while True:
            self._changed.clear()
            await self._do(self._register)
            pause = await self._do(self.look)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause or LOOK_SECONDS):
                    await self._changed.wait()

    async def _do(self, step: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of a step, or None if it failed, which is logged and stops no other step."""
        try:
            return await step()
        except (StatementFailed, DatabaseUnusable) as error:
            self._seldom.warning("schedules.failed", reason=str(error))
            return None

    async def _register(self) -> None:
        wanted = self._wanted
        if wanted and not self.registered:
            await self._store.register_schedules(wanted)
        self.registered = wanted is self._wanted

    async def look(self) -> float:
        """Fire the schedules that are due, one event at a time, and return the seconds until the next look."""
        pause = LOOK_SECONDS
        for row in await self._store.due_schedules():
            if row.seconds > 0:
                return max(PAUSE_SECONDS, min(pause, row.seconds))
            try:
                if await self._act(row):
                    pause = PAUSE_SECONDS
            except FAILURES as error:
                self._seldom.warning("schedule.failed", schedule=row.name, reason=str(error))
        return pause

    async def _act(self, row: ScheduleRow) -> bool:
        """Find the first time of a schedule, or fire it; return True if it is to be looked at again soon.

        Times are computed in a thread: a thousand of them take a tenth of a second, and time zones are files.
        """
        if row.next_at is not None:
            return await self._fire(row, row.next_at)
        following = await asyncio.to_thread(next_time, row.cron, row.timezone, row.after_at)
        if following is None:
            raise ValueError("its cron expression never comes")
        return await self._store.place_schedule(row, following)

    async def _fire(self, row: ScheduleRow, due: datetime) -> bool:
        found = await asyncio.to_thread(firing, row.cron, row.timezone, row.missed, due, row.now)
        if found is None:
            raise ValueError("its cron expression never comes again")
        outcome = await self._store.fire_schedule(row, found.next, found.times)
        match outcome:
            case "emitted":
                count = 1 if found.times is None else len(found.times)
                self._log.info("schedule.emitted", schedule=row.name, due=due.isoformat(), count=count)
            case "passed over":
                self._log.warning("schedule.passed_over", schedule=row.name, since=due.isoformat())
            case "refused":
                self._log.warning("schedule.refused", schedule=row.name)
            case _:
                pass
        return outcome in SOON
