"""The state that all requests to one page share: options, the database, findings, jobs, keys and threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, NotFound, RelayError
from outbox_relay.postgres import migrations
from outbox_relay.postgres.dsn import place_of
from outbox_relay.postgres.store import Store
from outbox_relay.ui.findings import CachedFindings
from outbox_relay.ui.forms import KEY_HASH
from outbox_relay.ui.jobs import Jobs

T = TypeVar("T")
CONNECTIONS: Final = 4
"""Maximum number of connections to the database."""
KEYS_MOST: Final = 10_000
"""Maximum number of keys that are remembered by their hash."""
THREADS_MOST: Final = 16
"""Maximum number of requests that are worked on at once, whatever threads the application has that mounts the page."""
WAIT_SECONDS: Final = 5.0
"""Longest wait of a request for one of them to end."""


class Keys:
    """The keys of events that this process has shown. Keys may name a person, so URLs contain their hashes instead.

    The hash is an HMAC under a secret of this process: without it, guesses of a key cannot be compared with a hash.
    """

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._known: OrderedDict[str, str] = OrderedDict()

    def hash(self, key: str) -> str:
        """Return the hash of ``key``, and remember the key."""
        digest = hmac.digest(self._secret, key.encode(errors="surrogatepass"), "sha256").hex()[:32]
        self._known[digest] = key
        self._known.move_to_end(digest)
        while len(self._known) > KEYS_MOST:
            self._known.popitem(last=False)
        return digest

    def resolve(self, fields: Mapping[str, str]) -> Mapping[str, str]:
        """Return ``fields``, with the field ``key`` if they select one by its hash. Raises ``NotFound``."""
        if not (digest := fields.get(KEY_HASH, "").strip()):
            return fields
        if (key := self._known.get(digest)) is None:
            raise NotFound("this process has not shown a key with this hash: enter the key in the search box")
        return {**fields, "key": key}


class RequestThreads:
    """Runs the functions of requests, each in a daemon thread, so that none of them keeps the process from ending."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(THREADS_MOST)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``work``. If its request is abandoned, it continues, and keeps its place until it ends.

        Raises ``DatabaseUnavailable`` if no place becomes free within ``WAIT_SECONDS``.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise DatabaseUnavailable(f"{THREADS_MOST} requests are waiting for the database already") from None
        result = concurrent.futures.Future[T]()
        running = asyncio.wrap_future(result)
        running.add_done_callback(lambda _: self._free.release())
        try:
            threading.Thread(target=_run, args=(result, work, arguments), name="request", daemon=True).start()
        except RuntimeError:  # the machine has no thread left
            result.cancel()
            raise
        return await asyncio.shield(running)


def _run(result: Future[T], work: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    result.set_running_or_notify_cancel()
    try:
        result.set_result(work(*arguments))
    except BaseException as error:
        result.set_exception(error)


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
            is_first = opening is None or (opening.done() and opening.exception() is not None)
            if opening is None or is_first:
                opening = self._opening = Future[Store]()
        if is_first:
            try:
                opening.set_result(self._open())
            except BaseException as error:
                opening.set_exception(error)
        return opening.result()

    def _open(self) -> Store:
        """Connect, and compare the version of the schema with ours."""
        store = Store(self.dsn, pooler=self.pooler, connections=CONNECTIONS)
        try:
            store.open()
            problem = migrations.fit(*store.schema())
        except BaseException:
            store.close()
            raise
        if problem:
            store.close()
            raise DatabaseUnusable(problem)
        return store

    def close(self) -> None:
        """End the jobs that run, and close every connection."""
        self.jobs.close()
        with self._lock:
            opening, self._opening = self._opening, None
        if opening is not None and opening.exception() is None:
            opening.result().close()
