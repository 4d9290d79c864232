"""Waking of an idle relay by LISTEN, on the only connection that needs a session and goes directly to the server.

An idle relay holds an advisory lock that every emit tries to take. An emit that does not get it sends a notification at
its commit. An emit that gets it sends none, because no relay is idle. One idle relay with the lock is enough for all.
No caller ever waits for the lock.

A notification can be missed: an emit may try the lock before the relay takes it and commit afterwards. Every wait is
therefore limited. The relay connects in a thread and waits for the lock for half a second at most, since both happen
between two ticks. Any role that may connect can send notifications on any channel, so that wake-ups have a least
distance.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import psycopg

from outbox_relay.domain.errors import DatabaseUnusable, RelayError
from outbox_relay.domain.log_events import LOG_EVENTS, RateLimitedLog
from outbox_relay.postgres.connection import CONNECT_SECONDS, Connection, connect, database_identity
from outbox_relay.postgres.errors import SET_POOLER, explain

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

LOCK = (1869967971, 1)
"""The two keys of the advisory lock of idle relays, as in ``outbox.emit_raw``."""
LOCK_SECONDS = 0.5
"""Longest wait for the answer of a statement about the lock. No tick is taken meanwhile."""
WAKE_SECONDS = 0.01
"""Least time between two wake-ups."""
RARE_SECONDS = 600.0
"""Least time between two log lines about failed connections."""
FAILING_SECONDS = 10.0
"""Time without a connection after which the log says why."""
RETRY_SECONDS = 2.0
"""Shortest time between a failed connection and the next attempt; the log is polled meanwhile."""
WRONG_SECONDS = 60.0
"""The same after a connection to another database."""
SERVER_KEEPALIVE = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
"""Ends the session of a client that vanished, which would otherwise keep the lock."""
POOLED = "it leads to a pooler: listen_dsn must lead to the server itself, or be left out"
WRONG_DATABASE = LOG_EVENTS["database.other_listened"]
DatabaseIdentity = tuple[str, int]
"""The identity of a database: see ``connection.database_identity``."""
_ERRORS = (psycopg.Error, RelayError, TimeoutError)


class CommitListener:
    """Waits until an emit commits, or for a limited time, in one thread.

    Without a DSN, or while it cannot connect, it only waits. ``here`` returns the identity of the database whose log is
    read. A connection to another database would never be notified: it is closed with a warning, and the log is polled.
    """

    def __init__(
        self,
        dsn: Callable[[], str] | None,
        here: Callable[[], DatabaseIdentity] | None = None,
        log: BoundLogger | None = None,
    ) -> None:
        self._dsn = dsn
        self._here = here
        self._log = RateLimitedLog(log, RARE_SECONDS) if log is not None else None
        self._attempt: Future[Connection] | None = None
        """The connection that a thread makes."""
        self._connection: Connection | None = None
        self._has_lock = False
        self._failing_since: float | None = None
        self._retry_at = self._woken_at = float("-inf")

    @property
    def listening(self) -> bool:
        """True if a notification would arrive."""
        return self._connection is not None

    def begin_listening(self) -> bool:
        """Take the lock of idle relays. Return False without a connection: no notification ends the next ``sleep``.

        A connection is made in the background, for a later call. The log must be read once more between this call and
        ``sleep``.
        """
        if self._connection is None:
            self._connect()
        if self._connection is not None and not self._has_lock:
            self._has_lock = self._ask("select pg_catalog.pg_try_advisory_lock(%s, %s)")
        return self.listening

    def sleep(self, seconds: float) -> bool:
        """Wait for a notification for at most ``seconds``; return whether one arrived."""
        connection, arrived = self._connection, False
        if connection is None:
            time.sleep(seconds)
            return False
        try:
            if _readable(connection, seconds):
                connection.pgconn.consume_input()
                while connection.pgconn.notifies():
                    arrived = True
        except psycopg.Error:
            self._disconnect()
        if arrived:
            time.sleep(max(0.0, self._woken_at + WAKE_SECONDS - time.monotonic()))
            self._woken_at = time.monotonic()
        return arrived

    def stop_listening(self) -> None:
        """Release the lock when there is work. It is kept over waits that end without a new event."""
        if self._has_lock:
            self._has_lock = False
            self._ask("select pg_catalog.pg_advisory_unlock(%s, %s)")

    def close(self) -> None:
        """Close the connection, which releases the lock, and make no other."""
        self._dsn = None
        self._disconnect()
        if self._attempt is not None:
            self._attempt.add_done_callback(_close)

    def _ask(self, statement: str) -> bool:
        """Return the answer of a statement about the lock. Disconnect if there is none in time."""
        connection = self._connection
        if connection is None:
            return False
        connection.until = until = time.monotonic() + LOCK_SECONDS
        connection.give_up_at = lambda: until  # nothing waits for a cancellation
        try:
            row = connection.execute(cast(Any, statement), LOCK).fetchone()
        except (psycopg.Error, TimeoutError):
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._disconnect()
            return False
        return bool(row and row[0])

    def _disconnect(self) -> None:
        connection, self._connection, self._has_lock = self._connection, None, False
        if connection is not None:
            connection.close()

    # -- connecting -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Take the connection that was made, or begin to make one unless it is too early after a failure."""
        attempt = self._attempt
        try:
            if attempt is not None and attempt.done():
                self._attempt = None
                self._connection, self._failing_since = attempt.result(), None
            elif attempt is None and self._dsn is not None and time.monotonic() >= self._retry_at:
                attempt = Future[Connection]()
                threading.Thread(target=self._make, args=(self._dsn, attempt), name="listen", daemon=True).start()
                self._attempt = attempt
        except (*_ERRORS, RuntimeError) as error:  # or the process can start no thread
            self._failed(error)

    def _make(self, dsn: Callable[[], str], attempt: Future[Connection]) -> None:
        try:
            connection = _connected(dsn(), SERVER_KEEPALIVE)
            try:
                connection.add_notify_handler(lambda _: None)  # without one, psycopg keeps all of them
                connection.execute("listen outbox")
                self._check(connection)
            except BaseException:
                connection.close()
                raise
            attempt.set_result(connection)
        except BaseException as error:
            attempt.set_exception(error)

    def _check(self, connection: Connection) -> None:
        """Raise ``DatabaseUnusable`` unless a connection leads to the database whose log is read."""
        if self._here is not None and database_identity(connection) != self._here():
            raise DatabaseUnusable(WRONG_DATABASE)

    def _failed(self, error: Exception) -> None:
        """Let the next attempt be made later. Log the reason if none has succeeded for a while."""
        now = time.monotonic()
        is_wrong = str(error) == WRONG_DATABASE
        self._retry_at = now + (WRONG_SECONDS if is_wrong else RETRY_SECONDS)
        if self._failing_since is None:
            self._failing_since = now
        if self._log is None:
            return
        if is_wrong:
            self._log.warning("database.other_listened")
        elif now - self._failing_since >= FAILING_SECONDS:
            self._log.warning("database.not_listening", reason=_reason(error))


def dsn_identity(dsn: str) -> DatabaseIdentity:
    """Return the identity of the database of ``dsn``. Raise ``DatabaseUnavailable`` or ``DatabaseUnusable``."""
    try:
        with _connected(dsn) as connection:
            return database_identity(connection)
    except (psycopg.Error, TimeoutError) as error:
        raise explain(error) from None


def _connected(dsn: str, more_options: str = "") -> Connection:
    """Return a connection that keeps a session. Raises ``RelayError``."""
    try:
        connection = connect(dsn, more_options=more_options)
    except RelayError as error:
        raise (DatabaseUnusable(POOLED) if SET_POOLER in str(error) else error) from None
    connection.until = time.monotonic() + CONNECT_SECONDS
    return connection


def _close(attempt: Future[Connection]) -> None:
    with suppress(BaseException):
        attempt.result().close()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_SECONDS} s"
    return str(explain(error) if isinstance(error, psycopg.Error) else error)


def _readable(connection: Connection, seconds: float) -> bool:
    """Wait until data arrives, for at most ``seconds``; return whether it did.

    The driver's own wait for notifications wakes up ten times a second, which would be most of the work of an idle
    relay.
    """
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(seconds * 1000))
