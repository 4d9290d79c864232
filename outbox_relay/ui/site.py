"""The state that all requests to one page share: options, the database, findings, jobs and keys."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres import migrations
from outbox_relay.postgres.store import Store
from outbox_relay.ui.findings import CachedFindings
from outbox_relay.ui.jobs import Jobs
from outbox_relay.ui.keys import Keys

CONNECTIONS = 4
"""Maximum number of connections to the database."""


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Options of the page. ``show_payloads`` is for operators only."""

    read_only: bool = False
    show_payloads: bool = False


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
    _store: Store | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def store(self) -> Store:
        """Return the connected store.

        Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``; the next request tries again.
        """
        async with self._opening:
            if self._store is None:
                store = Store(self.dsn, pooler=self.pooler, connections=CONNECTIONS)
                try:
                    await _open(store)
                except BaseException:
                    await store.close()
                    raise
                self._store = store
            return self._store

    async def close(self) -> None:
        """End what runs in the background, and close every connection."""
        await self.findings.close()
        await self.jobs.close()
        if self._store is not None:
            store, self._store = self._store, None
            await store.close()


async def _open(store: Store) -> None:
    """Connect, and compare the version of the schema with ours."""
    await store.open()
    if problem := migrations.fit(*await store.schema()):
        raise DatabaseUnusable(problem)
