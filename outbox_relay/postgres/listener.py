"""Waking of an idle relay by LISTEN, on the only connection that needs a session and goes directly to the server.

An idle relay holds an advisory lock that every emit tries to take. An emit that does not get it sends a notification at
its commit. An emit that gets it sends none, because no relay is idle. One idle relay with the lock is enough for all.
No caller ever waits for the lock.

A notification can be missed: an emit may try the lock before the relay takes it and commit afterwards. Every wait is
therefore limited.

Any role that may connect can send notifications on any channel. The relay connects in a thread and waits for the lock
for half a second at most, since both happen between two ticks. If notifications flood the channel, it disconnects and
polls for a while.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg.pq import ExecStatus

from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, RelayError
from outbox_relay.domain.log_events import LOG_EVENTS
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.connection import (
    CONNECT_SECONDS,
    CONNECTION_DEFAULTS,
    Connection,
    database_identity,
    direct,
    fix_settings,
    is_direct,
)
from outbox_relay.postgres.conninfo import find_authorities
from outbox_relay.postgres.errors import SET_POOLER, explain

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

LOCK = (1869967971, 1)
"""The two keys of the advisory lock of idle relays, as in ``outbox.emit_raw``."""
LOCK_SECONDS = 0.5
"""Longest wait for the answer of a statement about the lock. No tick is taken meanwhile."""
FLOOD = 1_000
"""Notifications in a second that no number of emits explains: one emit wakes the relay, which releases the lock."""
FLOOD_POLL_SECONDS = 30.0
"""Time for which the log is polled after a flood."""
RARE_SECONDS = 600.0
"""Least time between two log lines about floods, or about failed connections."""
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


class NotificationFlood(Exception):
    """Notifications arrive faster than emits send them."""


class CommitListener:
    """Waits until an emit commits, or for a limited time, in one thread.

    Without a DSN, or while it cannot connect, it only waits. ``here`` returns the identity of the database whose log is
    read. A connection to another database would never be notified: it is closed with one warning, and the log is
    polled.
    """

    def __init__(
        self,
        dsn: Callable[[], str] | None,
        here: Callable[[], DatabaseIdentity] | None = None,
        log: BoundLogger | None = None,
    ) -> None:
        self._dsn = dsn
        self._here = here
        self._log = log
        self._rare_log = RateLimitedLog(log, RARE_SECONDS) if log is not None else None
        self._failing_since: float | None = None
        self._connecting = False
        self._made: Connection | None = None
        """A connection that was made, for the thread that listens."""
        self._handover = threading.Lock()
        """Guards ``_made``, so that no connection is lost between two threads."""
        self._connection: Connection | None = None
        self._second = (float("-inf"), 0)
        """The beginning of the second of the last notification, and the number of notifications since."""
        self._has_lock = False
        self._retry_at = float("-inf")
        self._warned = False

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
            with self._handover:
                self._connection, self._made = self._made, None
                if self._connection is None:
                    self._begin_to_connect()
        if self._connection is not None and not self._has_lock:
            self._has_lock = self._ask(b"select pg_catalog.pg_try_advisory_lock(%d, %d)" % LOCK)
        return self.listening

    def sleep(self, seconds: float) -> bool:
        """Wait for a notification for at most ``seconds``; return whether one arrived."""
        connection = self._connection
        if connection is None:
            time.sleep(seconds)
            return False
        try:
            if _readable(connection, seconds):
                connection.pgconn.consume_input()
                return self._take_notifications(connection)
        except NotificationFlood:
            self._poll_through_flood()
        except psycopg.Error:
            self._disconnect()
        return False

    def stop_listening(self) -> None:
        """Release the lock when there is work. It is kept over waits that end without a new event."""
        if self._has_lock:
            self._has_lock = False
            self._ask(b"select pg_catalog.pg_advisory_unlock(%d, %d)" % LOCK)

    def close(self) -> None:
        """Close the connection, which releases the lock."""
        self._disconnect()
        with self._handover:
            self._dsn = None
            self._connection, self._made = self._made, None
        self._disconnect()

    # -- the lock -------------------------------------------------------------------------------------------------

    def _ask(self, statement: bytes) -> bool:
        """Return the answer of a statement about the lock. Disconnect if there is none in time.

        The driver would wait for the end of a statement that it has cancelled, however long notifications delay it.
        """
        if self._connection is None:
            return False
        try:
            return self._answer(self._connection, statement, time.monotonic() + LOCK_SECONDS)
        except NotificationFlood:
            self._poll_through_flood()
        except (psycopg.Error, TimeoutError):
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._disconnect()
        return False

    def _answer(self, connection: Connection, statement: bytes, until: float) -> bool:
        pgconn = connection.pgconn
        pgconn.send_query(statement)
        if pgconn.flush():
            raise psycopg.OperationalError("the connection accepts no statement")
        answer = False
        while True:
            while pgconn.is_busy():
                if (left := until - time.monotonic()) <= 0:
                    raise TimeoutError
                _readable(connection, left)
                pgconn.consume_input()
                self._take_notifications(connection)
            if (result := pgconn.get_result()) is None:
                return answer
            if result.status != ExecStatus.TUPLES_OK:
                raise psycopg.OperationalError("the statement was refused")
            answer = result.get_value(0, 0) == b"t"

    def _take_notifications(self, connection: Connection) -> bool:
        """Drop the notifications that were received; return whether there were any."""
        found = False
        while connection.pgconn.notifies():
            found = True
            now, (began, count) = time.monotonic(), self._second
            self._second = (began, count + 1) if now - began < 1 else (now, 1)
            if count >= FLOOD:
                raise NotificationFlood
        return found

    def _poll_through_flood(self) -> None:
        self._retry_at = time.monotonic() + FLOOD_POLL_SECONDS
        self._disconnect()
        if self._rare_log is not None:
            self._rare_log.warning("database.notify_flood", polls_seconds=FLOOD_POLL_SECONDS)

    def _disconnect(self) -> None:
        connection, self._connection, self._has_lock = self._connection, None, False
        if connection is not None:
            connection.close()

    # -- connecting -----------------------------------------------------------------------------------------------

    def _begin_to_connect(self) -> None:
        """Make a connection in a thread, unless that is under way or it is too early after a failure."""
        dsn = self._dsn
        if dsn is None or self._connecting or time.monotonic() < self._retry_at:
            return
        self._connecting = True
        try:
            threading.Thread(target=self._connect, args=(dsn,), name="listen: connecting", daemon=True).start()
        except RuntimeError as error:  # the process can start no thread
            self._connecting = False
            self._failed(str(error))

    def _connect(self, dsn: Callable[[], str]) -> None:
        """Make a connection, or let the next attempt be made later."""
        try:
            connection = _connected(dsn(), SERVER_KEEPALIVE)
            try:
                fix_settings(connection)
                connection.execute("listen outbox")
                expected = self._is_expected(connection)
            except BaseException:
                connection.close()
                raise
            self._failing_since = None
            with self._handover:
                kept = expected and self._dsn is not None
                if kept:
                    self._made = connection
            if not kept:
                connection.close()
                self._retry_at = time.monotonic() + WRONG_SECONDS
        except (psycopg.Error, RelayError, TimeoutError) as error:
            self._failed(_reason(error))
        finally:
            self._connecting = False

    def _failed(self, reason: str) -> None:
        """Let the next attempt be made later. Log the reason if none has succeeded for a while."""
        now = time.monotonic()
        self._retry_at = now + RETRY_SECONDS
        if self._failing_since is None:
            self._failing_since = now
        if self._rare_log is not None and now - self._failing_since >= FAILING_SECONDS:
            self._rare_log.warning("database.not_listening", reason=reason)

    def _is_expected(self, connection: Connection) -> bool:
        """Return whether this connection leads to the database whose log is read."""
        right = self._here is None or database_identity(connection) == self._here()
        if not right and not self._warned and self._log is not None:
            self._log.warning("database.other_listened")
            self._warned = True
        return right


def dsn_identity(dsn: str) -> DatabaseIdentity:
    """Return the identity of the database of ``dsn``. Raise ``DatabaseUnavailable`` or ``DatabaseUnusable``."""
    try:
        with _connected(dsn) as connection:
            return database_identity(connection)
    except TimeoutError:
        raise DatabaseUnavailable("the database did not answer in time") from None
    except psycopg.Error as error:
        raise explain(error) from None


def _connected(dsn: str, more_options: str = "") -> Connection:
    """Return a connection that keeps a session. Raises ``RelayError``, ``psycopg.Error`` or ``TimeoutError``."""
    find_authorities(dsn)
    try:
        connection = Connection.connect(direct(dsn, more_options), autocommit=True, **cast(Any, CONNECTION_DEFAULTS))
    except psycopg.Error as error:
        explained = explain(error, dsn)
        raise (DatabaseUnusable(POOLED) if SET_POOLER in str(explained) else explained) from None
    connection.until = time.monotonic() + CONNECT_SECONDS
    keeps_session = False
    try:
        keeps_session = is_direct(connection)
    finally:
        if not keeps_session:
            connection.close()
    if not keeps_session:
        raise DatabaseUnusable(POOLED)
    return connection


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
