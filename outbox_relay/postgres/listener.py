"""Waking of an idle relay by LISTEN, on the only connection that needs a session and goes directly to the server.

An idle relay holds an advisory lock that every emit tries to take. An emit that does not get it sends a notification at
its commit. An emit that gets it sends none, because no relay is idle. One idle relay with the lock is enough for all.
No caller ever waits for the lock.

A notification can be missed: an emit may try the lock before the relay takes it and commit afterwards. Every wait is
therefore limited.

Any role that may connect can send notifications on any channel. The relay connects in the background and waits for the
lock for half a second at most, since both happen between two ticks. If notifications flood the channel, it disconnects
and polls for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import ExecStatus

from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, RelayError
from outbox_relay.domain.file_reading import CONNECTION_FILES
from outbox_relay.domain.log_events import LOG_EVENTS
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.domain.thread_shortage import is_thread_shortage
from outbox_relay.postgres.connection import database_identity, direct, fix_settings, is_direct
from outbox_relay.postgres.conninfo import find_authorities
from outbox_relay.postgres.errors import SET_POOLER, explain

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

LOCK = (1869967971, 1)
"""The two keys of the advisory lock of idle relays, as in ``outbox.emit_raw``."""
ANSWER_SECONDS = 5.0
"""Longest wait for a new connection."""
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
KEEPALIVE: dict[str, str | int] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
SERVER_KEEPALIVE = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
"""Ends the session of a client that vanished, which would otherwise keep the lock."""


POOLED = "it leads to a pooler: listen_dsn must lead to the server itself, or be left out"
WRONG_DATABASE = LOG_EVENTS["database.other_listened"]
DatabaseIdentity = tuple[str, int]
"""The identity of a database: see ``connection.database_identity``."""


class NotificationFlood(Exception):
    """Notifications arrive faster than emits send them."""


class NotificationCount:
    """Counts the notifications of each second."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._count = 0

    def add(self) -> None:
        """Count a notification. Raise ``NotificationFlood`` at the ``FLOOD``-th of a second."""
        now = time.monotonic()
        if now - self._since >= 1:
            self._since, self._count = now, 0
        self._count += 1
        if self._count >= FLOOD:
            raise NotificationFlood


class CommitListener:
    """Waits until an emit commits, or for a limited time.

    Without a DSN, or while it cannot connect, it only waits. ``here`` returns the identity of the database whose log is
    read. A connection to another database would never be notified: it is closed with one warning, and the log is
    polled.
    """

    def __init__(
        self,
        dsn: Callable[[], str] | None,
        here: Callable[[], Awaitable[DatabaseIdentity]] | None = None,
        log: BoundLogger | None = None,
    ) -> None:
        self._dsn = dsn
        self._here = here
        self._log = log
        self._rare_log = RateLimitedLog(log, RARE_SECONDS) if log is not None else None
        self._failing_since: float | None = None
        self._connecting: asyncio.Task[AsyncConnection[Any] | None] | None = None
        self._connection: AsyncConnection[Any] | None = None
        self._notifications = NotificationCount()
        self._has_lock = False
        self._retry_at = float("-inf")
        self._warned = False

    @property
    def listening(self) -> bool:
        """True if a notification would arrive."""
        return self._connection is not None

    async def begin_listening(self) -> bool:
        """Take the lock of idle relays. Return False without a connection: no notification ends the next ``sleep``.

        A connection is made in the background, for a later call. The log must be read once more between this call and
        ``sleep``.
        """
        if self._connection is None:
            self._adopt_connection()
        if self._connection is not None and not self._has_lock:
            self._has_lock = await self._ask(b"select pg_catalog.pg_try_advisory_lock(%d, %d)" % LOCK)
        return self.listening

    def _adopt_connection(self) -> None:
        """Use the connection that was made in the background, or begin to make one."""
        if self._connecting is None:
            if self._dsn is not None and time.monotonic() >= self._retry_at:
                self._connecting = asyncio.create_task(self._connect_within_limit(self._dsn))
        elif self._connecting.done():
            self._connection, self._connecting = self._connecting.result(), None

    async def _connect_within_limit(self, dsn: Callable[[], str]) -> AsyncConnection[Any] | None:
        """Return a connection, or None if there is none: the next attempt is made later."""
        try:
            conninfo = await CONNECTION_FILES.acall(dsn)
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = await self._connect(conninfo)
                if await self._is_expected(connection):
                    self._failing_since = None
                    return connection
                await connection.close()
                self._retry_at = time.monotonic() + WRONG_SECONDS
        except TimeoutError:
            self._failed(f"no answer within {ANSWER_SECONDS:g} s")
        except (psycopg.Error, RelayError) as error:
            self._failed(str(explain(error) if isinstance(error, psycopg.Error) else error))
        except RuntimeError as error:
            if not is_thread_shortage(error):
                raise
            self._failed(str(error))
        return None

    def _failed(self, reason: str) -> None:
        """Let the next attempt be made later. Log the reason if none has succeeded for a while."""
        now = time.monotonic()
        self._retry_at = now + RETRY_SECONDS
        if self._failing_since is None:
            self._failing_since = now
        if self._rare_log is not None and now - self._failing_since >= FAILING_SECONDS:
            self._rare_log.warning("database.not_listening", reason=reason)

    async def _is_expected(self, connection: AsyncConnection[Any]) -> bool:
        """Return whether this connection leads to the database whose log is read."""
        try:
            right = self._here is None or await database_identity(connection) == await self._here()
        except BaseException:
            await connection.close()
            raise
        if not right and not self._warned and self._log is not None:
            self._log.warning("database.other_listened")
            self._warned = True
        return right

    async def sleep(self, seconds: float) -> bool:
        """Wait for a notification for at most ``seconds``; return whether one arrived."""
        connection = self._connection
        if connection is None:
            await asyncio.sleep(seconds)
            return False
        try:
            if await _readable(connection.fileno(), seconds):
                connection.pgconn.consume_input()
                return self._take_notifications(connection)
        except NotificationFlood:
            await self._poll_through_flood()
        except psycopg.Error:
            await self._disconnect()
        return False

    async def stop_listening(self) -> None:
        """Release the lock when there is work. It is kept over waits that end without a new event."""
        if self._has_lock:
            self._has_lock = False
            await self._ask(b"select pg_catalog.pg_advisory_unlock(%d, %d)" % LOCK)

    async def _ask(self, statement: bytes) -> bool:
        """Return the answer of a statement about the lock. Disconnect if there is none in time.

        The driver would wait for the end of a statement that it has cancelled, however long notifications delay it.
        """
        if self._connection is None:
            return False
        try:
            async with asyncio.timeout(LOCK_SECONDS):
                return await self._answer(self._connection, statement)
        except NotificationFlood:
            await self._poll_through_flood()
        except (psycopg.Error, TimeoutError):
            self._retry_at = time.monotonic() + RETRY_SECONDS
            await self._disconnect()
        except BaseException:  # cancelled: what arrives next would be taken for the answer of the next statement
            await self._disconnect()
            raise
        return False

    async def _answer(self, connection: AsyncConnection[Any], statement: bytes) -> bool:
        pgconn = connection.pgconn
        pgconn.send_query(statement)
        if pgconn.flush():
            raise psycopg.OperationalError("the connection accepts no statement")
        answer = False
        while True:
            while pgconn.is_busy():
                await _readable(connection.fileno(), LOCK_SECONDS)
                pgconn.consume_input()
                self._take_notifications(connection)
            if (result := pgconn.get_result()) is None:
                return answer
            if result.status != ExecStatus.TUPLES_OK:
                raise psycopg.OperationalError("the statement was refused")
            answer = result.get_value(0, 0) == b"t"

    def _take_notifications(self, connection: AsyncConnection[Any]) -> bool:
        """Drop the notifications that were received; return whether there were any."""
        found = False
        while connection.pgconn.notifies():
            found = True
            self._notifications.add()
        return found

    async def _poll_through_flood(self) -> None:
        self._retry_at = time.monotonic() + FLOOD_POLL_SECONDS
        await self._disconnect()
        if self._rare_log is not None:
            self._rare_log.warning("database.notify_flood", polls_seconds=FLOOD_POLL_SECONDS)

    async def close(self) -> None:
        """Close the connection, which releases the lock, and end the attempt to make one."""
        if self._connecting is not None:
            connecting, self._connecting = self._connecting, None
            connecting.cancel()
            await asyncio.wait([connecting])
            if not connecting.cancelled() and (made := connecting.result()) is not None:
                await made.close()
        await self._disconnect()

    async def _disconnect(self) -> None:
        connection, self._connection, self._has_lock = self._connection, None, False
        if connection is not None:
            await connection.close()

    async def _connect(self, dsn: str) -> AsyncConnection[Any]:
        connection = await _connected(dsn, SERVER_KEEPALIVE)
        try:
            await fix_settings(connection)
            await connection.execute("listen outbox")
        except BaseException:
            await connection.close()
            raise
        return connection


async def dsn_identity(dsn: str) -> DatabaseIdentity:
    """Return the identity of the database of ``dsn``. Raise ``DatabaseUnavailable`` or ``DatabaseUnusable``."""
    try:
        async with asyncio.timeout(2 * ANSWER_SECONDS), await _connected(dsn) as connection:
            return await database_identity(connection)
    except TimeoutError:
        raise DatabaseUnavailable(f"the database did not answer within {2 * ANSWER_SECONDS:g} s") from None
    except psycopg.Error as error:
        raise explain(error) from None


async def _connected(dsn: str, more_options: str = "") -> AsyncConnection[Any]:
    """Return a connection that keeps a session. Raises ``RelayError``."""
    find_authorities(dsn)
    try:
        connection = await AsyncConnection.connect(direct(dsn, more_options), autocommit=True, **cast(Any, KEEPALIVE))
    except psycopg.Error as error:
        explained = explain(error, dsn)
        raise (DatabaseUnusable(POOLED) if SET_POOLER in str(explained) else explained) from None
    keeps_session = False
    try:
        keeps_session = await is_direct(connection)
    except psycopg.Error as error:
        raise explain(error) from None
    finally:
        if not keeps_session:
            await connection.close()
    if not keeps_session:
        raise DatabaseUnusable(POOLED)
    return connection


async def _readable(socket: int, seconds: float) -> bool:
    """Wait until data arrives, for at most ``seconds``; return whether it did.

    The driver's own wait for notifications wakes up ten times a second, which would be most of the work of an idle
    relay.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(socket, arrived.set)
    try:
        async with asyncio.timeout(seconds):
            await arrived.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(socket)
    return True
