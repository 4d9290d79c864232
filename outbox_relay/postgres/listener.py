"""Waking of an idle relay by LISTEN, on the only connection that needs a session and goes directly to the server.

An idle relay holds an advisory lock that every emit tries to take. An emit that does not get it sends a notification at
its commit. An emit that gets it sends none, because no relay is idle. One idle relay with the lock is enough for all.
No caller ever waits for the lock.

A notification can be missed: an emit may try the lock before the relay takes it and commit afterwards. Every wait is
therefore limited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg import AsyncConnection

from outbox_relay.domain.cancellation import propagate_cancellation
from outbox_relay.domain.errors import DatabaseUnavailable, RelayError
from outbox_relay.domain.log_events import LOG_EVENTS
from outbox_relay.postgres.connection import database_identity, direct, fix_settings
from outbox_relay.postgres.errors import explain

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

LOCK = (1869967971, 1)
"""The two keys of the advisory lock of idle relays, as in ``outbox.emit_raw``."""
ANSWER_SECONDS = 5.0
"""Longest wait for any statement on this connection."""
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


WRONG_DATABASE = LOG_EVENTS["database.other_listened"]
DatabaseIdentity = tuple[int, int]
"""The identity of a database: see ``connection.database_identity``."""


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
        self._connection: AsyncConnection[Any] | None = None
        self._has_lock = False
        self._retry_at = float("-inf")
        self._warned = False

    @property
    def listening(self) -> bool:
        """True if a notification would arrive."""
        return self._connection is not None

    async def begin_listening(self) -> bool:
        """Take the lock of idle relays. Return False without a connection: no notification ends the next ``sleep``.

        The log must be read once more between this call and ``sleep``.
        """
        if self._dsn is None or (self._connection is None and time.monotonic() < self._retry_at):
            return False
        try:
            with propagate_cancellation():
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._connect_and_lock(self._dsn())
        except (psycopg.Error, TimeoutError, RelayError):
            await self.close()
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        return self.listening

    async def _connect_and_lock(self, dsn: str) -> None:
        if self._connection is None:
            connection = await self._connect(dsn)
            if not await self._is_expected(connection):
                await connection.close()
                self._retry_at = time.monotonic() + WRONG_SECONDS
                return
            self._connection = connection
        if not self._has_lock:
            cursor = await self._connection.execute("select pg_try_advisory_lock(%s, %s)", LOCK)
            row = await cursor.fetchone()
            self._has_lock = bool(row and row[0])

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
        if self._connection is None:
            await asyncio.sleep(seconds)
            return False
        woken = False
        try:
            if await _readable(self._connection.fileno(), seconds):
                self._connection.pgconn.consume_input()
                while self._connection.pgconn.notifies():
                    woken = True
        except psycopg.Error:
            await self.close()
        return woken

    async def stop_listening(self) -> None:
        """Release the lock when there is work. It is kept over waits that end without a new event."""
        if not self._has_lock or self._connection is None:
            return
        self._has_lock = False
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._connection.execute("select pg_advisory_unlock(%s, %s)", LOCK)
        except (psycopg.Error, TimeoutError):
            await self.close()

    async def close(self) -> None:
        """Close the connection, which releases the lock."""
        connection, self._connection, self._has_lock = self._connection, None, False
        if connection is not None:
            await connection.close()

    async def _connect(self, dsn: str) -> AsyncConnection[Any]:
        try:
            conninfo = direct(dsn, SERVER_KEEPALIVE)
            connection = await AsyncConnection.connect(conninfo, autocommit=True, **cast(Any, KEEPALIVE))
        except psycopg.Error as error:
            raise explain(error) from None
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
        async with asyncio.timeout(2 * ANSWER_SECONDS):
            async with await AsyncConnection.connect(
                direct(dsn), autocommit=True, **cast(Any, KEEPALIVE)
            ) as connection:
                return await database_identity(connection)
    except TimeoutError:
        raise DatabaseUnavailable(f"the database did not answer within {2 * ANSWER_SECONDS:g} s") from None
    except psycopg.Error as error:
        raise explain(error) from None


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
