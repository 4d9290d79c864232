"""The connections of one sink: bounded in number, kept for a while between requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from outbox_relay.sinks.webhook.connection import HttpConnection
from outbox_relay.sinks.webhook.connector import Connector
from outbox_relay.sinks.webhook.exchange import Exchange

KEPT_SECONDS = 4.0
"""Time for which a connection without a request is kept. Many servers close theirs after 5 s."""
AGE_SECONDS = 60.0
"""Age from which a connection carries no further request.

The next connection looks the name up again, so that requests follow a name that moves.
"""


class ConnectionPool:
    """At most ``limit`` connections in use, made by ``connector``. As many may be kept; further requests wait."""

    def __init__(self, connector: Connector, limit: int) -> None:
        self._connector = connector
        self._free = asyncio.Semaphore(limit)
        self._used: set[HttpConnection] = set()
        self._kept: deque[tuple[float, HttpConnection]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._renewed_at = float("-inf")

    async def send(self, exchange: Exchange, request: bytes) -> None:
        """Send ``request`` over a kept or a new connection, as ``HttpConnection.send`` does.

        Raises NotConnected and what that raises.
        """
        async with self._free:
            connection = self._take(exchange) or await self._connector.connect(HttpConnection, exchange)
            self._used.add(connection)
            try:
                await connection.send(exchange, request)
            finally:
                self._used.remove(connection)
                self._put_back(connection)

    def renew(self) -> None:
        """Send no further request over a connection that was made, or begun, before now."""
        self._renewed_at = time.monotonic()
        self._drop_kept()

    def drop(self) -> None:
        """End every connection, at once."""
        for connection in self._used:
            connection.abort()
        self._drop_kept()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _take(self, exchange: Exchange) -> HttpConnection | None:
        """Return the connection used last, so that the others grow old and are dropped."""
        if exchange.force_new_connection:
            self._drop_kept()
        while self._kept:
            since, connection = self._kept.pop()
            if self._is_reusable(connection) and time.monotonic() - since < KEPT_SECONDS:
                return connection
            connection.abort()
        return None

    def _put_back(self, connection: HttpConnection) -> None:
        if not self._is_reusable(connection):
            connection.abort()
            return
        self._kept.append((time.monotonic(), connection))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._drop_old)

    def _is_reusable(self, connection: HttpConnection) -> bool:
        oldest = max(self._renewed_at, time.monotonic() - AGE_SECONDS)
        return connection.reusable and connection.made_at > oldest

    def _drop_kept(self) -> None:
        while self._kept:
            self._kept.pop()[1].abort()

    def _drop_old(self) -> None:
        self._sweep = None
        oldest = time.monotonic() - KEPT_SECONDS
        while self._kept and (self._kept[0][0] <= oldest or not self._kept[0][1].reusable):
            self._kept.popleft()[1].abort()
        if self._kept:
            self._sweep = asyncio.get_running_loop().call_later(self._kept[0][0] - oldest, self._drop_old)
