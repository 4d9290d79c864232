"""The state that all requests to one page share: options, the database, findings, jobs, keys and its links."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from outbox_relay.domain.errors import DatabaseUnusable, RelayError
from outbox_relay.postgres import migrations
from outbox_relay.postgres.dsn import place_of
from outbox_relay.postgres.store import Store
from outbox_relay.ui.findings import CachedFindings
from outbox_relay.ui.jobs import Jobs
from outbox_relay.ui.keys import Keys
from outbox_relay.ui.presence import SchedulePresence

CONNECTIONS = 4
"""Maximum number of connections to the database."""


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Options of the page. ``show_payloads`` is for operators only; ``label`` names the environment on every page."""

    read_only: bool = False
    show_payloads: bool = False
    label: str = ""


@dataclass(slots=True)
class Site:
    """The state of one page. The database is connected to at the first request, since a mounted page never starts."""

    dsn: Callable[[], str]
    pooler: bool
    options: PageOptions
    secret: bytes = field(default_factory=lambda: os.urandom(32))
    findings: CachedFindings = field(default_factory=CachedFindings)
    jobs: Jobs = field(default_factory=Jobs)
    keys: Keys = field(default_factory=Keys)
    schedule_presence: SchedulePresence = field(default_factory=SchedulePresence)
    summaries: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Held while a summary is made: one at a time, so that the other pages keep their connections."""
    _opening: asyncio.Task[Store] | None = None

    def database(self) -> str:
        """Return HOST:PORT/NAME of the database as the connection string has it now; empty if it cannot be read."""
        try:
            return place_of(self.dsn())
        except (RelayError, OSError):
            return ""

    async def store(self) -> Store:
        """Return the connected store. All requests that come meanwhile share one attempt to connect.

        Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``; the next request tries again.
        """
        if self._opening is None or (self._opening.done() and _has_failed(self._opening)):
            self._opening = asyncio.create_task(self._open(), name="connect")
        return await asyncio.shield(self._opening)

    def has_schedules(self) -> bool:
        """Return True if there was a schedule at the last look, which is at most seconds old while pages are opened."""
        opening = self._opening
        if opening is None or not opening.done() or _has_failed(opening):
            return False
        return self.schedule_presence.current(opening.result())

    async def _open(self) -> Store:
        """Connect, compare the version of the schema with ours, and read the secret of links."""
        store = Store(self.dsn, pooler=self.pooler, connections=CONNECTIONS)
        try:
            await store.open()
            _require_fit(await store.schema())
            [(secret,)] = await store.call("page_key", {}, "read")
            self.keys.use(bytes(secret))
            await self.schedule_presence.look(store)
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """End what runs in the background, and close every connection."""
        await self.findings.close()
        await self.schedule_presence.close()
        await self.jobs.close()
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
            if not _has_failed(opening):
                await opening.result().close()


def _has_failed(opening: asyncio.Task[Store]) -> bool:
    """Return True if an attempt that has ended has no store."""
    return opening.cancelled() or opening.exception() is not None


def _require_fit(versions: tuple[int, int]) -> None:
    """Raise ``DatabaseUnusable`` if this version does not work with the schema."""
    if problem := migrations.fit(*versions):
        raise DatabaseUnusable(problem)
