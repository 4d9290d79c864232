"""The state that all requests to one page share: options, the database, findings, jobs, keys and its links."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from outbox_relay.domain.errors import DatabaseUnusable, RelayError
from outbox_relay.postgres import migrations
from outbox_relay.postgres.dsn import place_of
from outbox_relay.postgres.store import Store
from outbox_relay.ui.findings import CachedFindings
from outbox_relay.ui.jobs import Jobs
from outbox_relay.ui.keys import Keys
from outbox_relay.ui.threads import RequestThreads

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
    threads: RequestThreads = field(default_factory=RequestThreads)
    summaries: threading.Lock = field(default_factory=threading.Lock)
    """Held while a summary is made: one at a time, so that the other pages keep their connections."""
    _opening: Future[Store] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def database(self) -> str:
        """Return HOST:PORT/NAME of the database as the connection string has it now; empty if it cannot be read."""
        try:
            return place_of(self.dsn())
        except (RelayError, OSError):
            return ""

    def store(self) -> Store:
        """Return the connected store. All requests that come meanwhile share one attempt to connect.

        Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``; the next request tries again.
        """
        with self._lock:
            opening = self._opening
            is_first = False
            if opening is None or (opening.done() and opening.exception() is not None):
                opening = self._opening = Future[Store]()
                is_first = True
        if is_first:
            try:
                opening.set_result(self._open())
            except BaseException as error:
                opening.set_exception(error)
        return opening.result()

    def _open(self) -> Store:
        """Connect, compare the version of the schema with ours, and read the secret of links."""
        store = Store(self.dsn, pooler=self.pooler, connections=CONNECTIONS)
        try:
            store.open()
            _require_fit(store.schema())
            [(secret,)] = store.call("page_key", {}, "read")
            self.keys.use(bytes(secret))
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """End the jobs that run, and close every connection."""
        self.jobs.close()
        with self._lock:
            opening, self._opening = self._opening, None
        if opening is not None and opening.exception() is None:
            opening.result().close()


def _require_fit(versions: tuple[int, int]) -> None:
    """Raise ``DatabaseUnusable`` if this version does not work with the schema."""
    if problem := migrations.fit(*versions):
        raise DatabaseUnusable(problem)
