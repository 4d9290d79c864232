"""How a sleeping relay is woken: the only connection that needs a session and goes directly to the server.

While a relay sleeps it holds an advisory lock that every emit tries: an emit that does not get it sends a
notification at its commit, and one that does get it knows that nobody sleeps and sends none. If another
sleeper has the lock, that one serves for all. Nothing ever waits for the lock. A wake-up can be missed (the
emit looked before the relay lay down and committed after): a sleep is never longer than it is told to be.
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
from outbox_relay.postgres.connection import direct, fix_settings, place
from outbox_relay.postgres.errors import explain

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

LOCK = (1869967971, 1)
"""The pair of keys of the sleepers' advisory lock, as ``outbox.emit_raw`` has them."""
CHANNEL = "outbox"
ANSWER_SECONDS = 5.0
"""Longest wait for any statement on this connection."""
RETRY_SECONDS = 2.0
"""Least time between a connection that could not be made and the next try; until then the log is polled."""
WRONG_SECONDS = 60.0
"""The same after one that led to another database."""
KEEPALIVE: dict[str, str | int] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
SERVER_KEEPALIVE = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
"""Ends a session whose client vanished, or its lock would say for ever that somebody sleeps."""


ELSEWHERE = (
    "database.listen_dsn leads to another server or database than database.dsn: the relay polls until it is corrected"
)
Place = tuple[int, int]
"""What tells one database from all others: see ``connection.place``."""


class Wakeup:
    """Sleep until an emit commits, or for a while. Without a DSN, or while it cannot connect: for a while.

    ``here`` returns the place of the database whose log is read. A connection that leads to another one would never
    be notified: it is closed, which is said once, and the log is polled.
    """

    def __init__(
        self,
        dsn: Callable[[], str] | None,
        here: Callable[[], Awaitable[Place]] | None = None,
        log: BoundLogger | None = None,
    ) -> None:
        self._dsn = dsn
        self._here = here
        self._log = log
        self._connection: AsyncConnection[Any] | None = None
        self._asleep = False
        self._again_at = float("-inf")
        self._warned = False

    @property
    def listening(self) -> bool:
        """Whether a notification would arrive."""
        return self._connection is not None

    async def lie_down(self) -> bool:
        """Say that somebody sleeps. Returns False when that cannot be said: then only the time wakes.

        The log must be looked at once more between this and ``sleep``.
        """
        if self._dsn is None or (self._connection is None and time.monotonic() < self._again_at):
            return False
        try:
            with propagate_cancellation():
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._say_asleep(self._dsn())
        except (psycopg.Error, TimeoutError, RelayError):
            await self.close()
            self._again_at = time.monotonic() + RETRY_SECONDS
            return False
        return self.listening

    async def _say_asleep(self, dsn: str) -> None:
        if self._connection is None:
            connection = await self._connect(dsn)
            if not await self._leads_here(connection):
                await connection.close()
                self._again_at = time.monotonic() + WRONG_SECONDS
                return
            self._connection = connection
        if not self._asleep:
            cursor = await self._connection.execute("select pg_try_advisory_lock(%s, %s)", LOCK)
            row = await cursor.fetchone()
            self._asleep = bool(row and row[0])

    async def _leads_here(self, connection: AsyncConnection[Any]) -> bool:
        """Whether an emit into the log that is read would notify this connection."""
        try:
            right = self._here is None or await place(connection) == await self._here()
        except BaseException:
            await connection.close()
            raise
        if not right and not self._warned and self._log is not None:
            self._log.warning(ELSEWHERE)
            self._warned = True
        return right

    async def sleep(self, seconds: float) -> bool:
        """Wait for a notification, at most ``seconds``; returns whether one came."""
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

    async def get_up(self) -> None:
        """Say that nobody sleeps here any more. Kept over empty sleeps, given back when there is work."""
        if not self._asleep or self._connection is None:
            return
        self._asleep = False
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._connection.execute("select pg_advisory_unlock(%s, %s)", LOCK)
        except (psycopg.Error, TimeoutError):
            await self.close()

    async def close(self) -> None:
        """Give back the connection, and with it the lock."""
        connection, self._connection, self._asleep = self._connection, None, False
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


async def listens_at(dsn: str) -> Place:
    """Return the place that ``dsn`` leads to. Raises ``DatabaseUnavailable`` or ``DatabaseUnusable``."""
    try:
        async with asyncio.timeout(2 * ANSWER_SECONDS):
            async with await AsyncConnection.connect(
                direct(dsn), autocommit=True, **cast(Any, KEEPALIVE)
            ) as connection:
                return await place(connection)
    except TimeoutError:
        raise DatabaseUnavailable(f"the database did not answer within {2 * ANSWER_SECONDS:g} s") from None
    except psycopg.Error as error:
        raise explain(error) from None


async def _readable(socket: int, seconds: float) -> bool:
    """Wait until something has come, for ``seconds`` at most.

    The driver's own wait for notifications looks ten times a second whether it should end, which is most of what a
    sleeping relay would do.
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
