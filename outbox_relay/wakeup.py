"""How a sleeping relay is woken: the only connection that needs a session and goes directly to the server.

While a relay sleeps it holds an advisory lock that every emit tries: an emit that does not get it sends a
notification at its commit, and one that does get it knows that nobody sleeps and sends none. If another
sleeper has the lock, that one serves for all. Nothing ever waits for the lock. A wake-up can be missed (the
emit looked before the relay lay down and committed after): a sleep is never longer than it is told to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import psycopg
from psycopg import AsyncConnection

from outbox_relay.cancelling import heeded
from outbox_relay.dberrors import explain
from outbox_relay.errors import DatabaseLost

LOCK = (1869967971, 1)
"""The pair of keys of the sleepers' advisory lock, as ``outbox.emit_raw`` has them."""
CHANNEL = "outbox"
ANSWER_SECONDS = 5.0
"""Longest wait for any statement on this connection."""
KEEPALIVE: dict[str, str | int] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
SERVER_KEEPALIVE = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
"""Ends a session whose client vanished, or its lock would say for ever that somebody sleeps."""


class Wakeup:
    """Sleep until an emit commits, or for a while. Without a DSN, or while it cannot connect: for a while."""

    def __init__(self, dsn: Callable[[], str] | None) -> None:
        self._dsn = dsn
        self._connection: AsyncConnection[Any] | None = None
        self._asleep = False

    @property
    def listening(self) -> bool:
        """Whether a notification would arrive."""
        return self._connection is not None

    async def lie_down(self) -> bool:
        """Say that somebody sleeps. Returns False when that cannot be said: then only the time wakes.

        The log must be looked at once more between this and ``sleep``.
        """
        if self._dsn is None:
            return False
        try:
            with heeded():
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._say_asleep()
        except (psycopg.Error, TimeoutError, DatabaseLost):
            await self.close()
            return False
        return True

    async def _say_asleep(self) -> None:
        if self._connection is None and self._dsn is not None:
            self._connection = await self._connect(self._dsn())
        if self._connection is not None and not self._asleep:
            cursor = await self._connection.execute("select pg_try_advisory_lock(%s, %s)", LOCK)
            row = await cursor.fetchone()
            self._asleep = bool(row and row[0])

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
            options = cast(Any, {**KEEPALIVE, "options": SERVER_KEEPALIVE})
            connection = await AsyncConnection.connect(dsn, autocommit=True, **options)
        except psycopg.Error as error:
            raise explain(error) from None
        try:
            await connection.execute("listen outbox")
        except BaseException:
            await connection.close()
            raise
        return connection


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
