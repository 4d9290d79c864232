"""The blocking connection of the looks, made in the background and replaced before it is given up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, LiteralString, TypeVar, cast

import psycopg
from psycopg.waiting import Ready, Wait

from outbox_relay.domain.errors import DatabaseUnavailable, RelayError
from outbox_relay.domain.file_reading import CONNECTION_FILES
from outbox_relay.postgres.connection import CONNECTION_DEFAULTS, direct, settings_to_fix
from outbox_relay.postgres.errors import explain

T = TypeVar("T")

LIFETIME_SECONDS = 3600.0
"""Maximum age of a connection, so that the relay follows changes of addresses and passwords."""
JITTER = 0.1
"""Share of the age that is random, so that relays that started together do not connect together."""
PAUSE_SECONDS, PAUSE_MAX_SECONDS = 1.0, 60.0
"""Pause after the first failure to connect, doubled after each further one, and its limit."""
STATEMENT_TIMEOUT: LiteralString = "set statement_timeout = '3s'"
"""Ends a look that takes long before the relay gives up its connection."""


class LookConnection(psycopg.Connection[Any]):
    """A connection that gives up a statement after ``seconds``, with ``TimeoutError``. Then it is of no further use."""

    seconds = 5.0

    def wait(self, gen: Generator[Wait, Ready | int, T], *args: Any, **kwargs: Any) -> T:
        """Run ``gen``, as the method that this overrides."""
        return super().wait(_limited(gen, time.monotonic() + self.seconds), *args, **kwargs)


def _limited(gen: Generator[Wait, Ready | int, T], until: float) -> Generator[Wait, Ready | int, T]:
    """Wrap ``gen`` so that it ends after ``until``. The driver resumes it ten times a second while nothing arrives."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready:
                wanted = gen.send(ready)
            if time.monotonic() > until:
                raise TimeoutError
            if not ready:
                wanted = gen.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


class LookConnector:
    """Makes connections in a thread of its own, one at a time, and passes each to ``adopt``, in that thread.

    Ticks come through the pool meanwhile. After a failure the next attempt comes after a pause. The receiver calls
    ``adopted`` when it uses the connection, or closes it.
    """

    def __init__(self, dsn: Callable[[], str], adopt: Callable[[LookConnection], None], *, pooler: bool) -> None:
        self._dsn = dsn
        self._adopt = adopt
        self._pooler = pooler
        self._busy = False
        self._discarded = False
        self._failures = 0
        self._not_before = float("-inf")
        self._outdated_at = float("inf")
        self.trouble: str | None = None
        """Why the last attempt failed, or None."""

    @property
    def is_outdated(self) -> bool:
        """True if the newest connection should be replaced because of its age."""
        return time.monotonic() >= self._outdated_at

    def connect(self) -> None:
        """Begin to make a connection, unless one is being made or it is too early after a failure."""
        if self._busy or time.monotonic() < self._not_before:
            return
        self._busy, self._discarded = True, False
        try:
            threading.Thread(target=self._connect, name="looks: connecting", daemon=True).start()
        except RuntimeError as error:  # the process has no thread left
            self._failed(str(error))

    def _connect(self) -> None:
        try:
            connection = self._connected()
        except RelayError as error:
            self._failed(str(error))
        except Exception as error:
            # Its text may contain the connection string.
            self._failed(type(error).__name__)
        else:
            if self._discarded:
                connection.close()
                self._busy = False
            else:
                self._adopt(connection)

    def discard(self) -> None:
        """Close the connection that is being made, if there is one, instead of passing it on."""
        self._discarded = True

    def adopted(self) -> None:
        """Record that the new connection is in use."""
        self.trouble, self._failures = None, 0
        self._outdated_at = time.monotonic() + LIFETIME_SECONDS * (1 - random.random() * JITTER)  # noqa: S311
        self._busy = False

    def _failed(self, reason: str) -> None:
        pause = min(PAUSE_MAX_SECONDS, PAUSE_SECONDS * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self._not_before = time.monotonic() + pause
        self.trouble = f"no connection for looks could be made, the next attempt is in {pause:.0f} s: {reason}"
        self._busy = False

    def _connected(self) -> LookConnection:
        """Return a new connection with the settings that looks depend on. Raises ``RelayError``."""
        dsn = CONNECTION_FILES.call(self._dsn)
        conninfo = dsn if self._pooler else direct(dsn)
        try:
            connection = LookConnection.connect(conninfo, autocommit=True, **cast(Any, CONNECTION_DEFAULTS))
            try:
                self._configure(connection)
            except BaseException:
                connection.close()
                raise
        except psycopg.Error as error:
            raise explain(error, dsn) from None
        except TimeoutError:
            raise DatabaseUnavailable("the database did not answer in time") from None
        return connection

    def _configure(self, connection: LookConnection) -> None:
        connection.prepare_threshold = None if self._pooler else 2
        if not self._pooler:
            for statement in (*settings_to_fix(connection), STATEMENT_TIMEOUT):
                connection.execute(statement)
