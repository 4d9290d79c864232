"""The HTTP client of webhooks: a request goes over a kept connection or a new one, within one time limit."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

from outbox_relay.sinks.webhook.connection import ConnectionLost, Exchange, ExchangeFailed, HttpConnection
from outbox_relay.sinks.webhook.connector import Connector, header_lines
from outbox_relay.sinks.webhook.http_client import NoResponse, Response

KEPT_SECONDS = 4.0
"""Time for which a connection without a request may carry another. Many servers close theirs after 5 s."""
AGE_SECONDS = 60.0
"""Age from which a connection carries no further request, so that requests follow a name that moves."""
_SENT_RAW = "!#$%&'()*+,-./:;=?@[]^_|~"
"""Characters of a path and a query that are not escaped, besides letters and digits."""


class PooledClient:
    """Posts to ``url`` over connections of ``connector``, each for one request at a time, and kept between requests.

    ``url`` has been checked with the settings.
    """

    def __init__(self, url: str, connector: Connector) -> None:
        self._connector = connector
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        target = quote(f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}", safe=_SENT_RAW)
        named = f"[{host}]" if ":" in host else host.rstrip(".")
        shown = "" if port in (None, 443 if parts.scheme == "https" else 80) else f":{port}"
        self._start = f"POST {target} HTTP/1.1\r\nhost: {named}{shown}\r\n"
        self._kept: deque[HttpConnection] = deque()
        """Connections without a request, the one used last at the end."""
        self._sweep: asyncio.TimerHandle | None = None

    async def post(
        self, headers: Sequence[tuple[str, str]], body: bytes, seconds: float, until: float = math.inf
    ) -> Response | NoResponse:
        """See ``HttpClient``. Only ``host`` and ``content-length`` are added.

        A request that met a kept connection which the destination had closed is sent once more at once, over a new one.
        """
        exchange, failure = Exchange(until), None
        try:
            request = f"{self._start}{header_lines(headers)}content-length: {len(body)}\r\n\r\n".encode("ascii") + body
            await self._exchange(exchange, request, seconds)
        except Exception as error:  # a request that cannot be made must not end the relay
            failure = error
        took, read = time.monotonic() - exchange.began, exchange.response
        if read is not None and read.status:
            shown = {} if 200 <= read.status <= 299 else read.headers()
            return Response(read.status, shown, bytes(read.prefix), took, exchange.timings(), read.whole)
        match failure:
            case ExchangeFailed():
                code, reason = failure.code, failure.reason
            case TimeoutError() if exchange.first_byte is None:
                code, reason = "read_timeout", f"no response within {seconds:g} s"
            case TimeoutError():
                code, reason = "deadline", f"the headers of the response were not complete within {seconds:g} s"
            case _:
                code, reason = "internal", f"the request could not be made: {type(failure).__name__}"
        return NoResponse(code, exchange.resent or exchange.sent_at is not None, reason, took, exchange.timings())

    async def _exchange(self, exchange: Exchange, request: bytes, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        try:
            if (connection := self._take_kept()) is not None:
                return await self._send(connection, exchange, request, end)
        except ConnectionLost:
            if exchange.first_byte is not None:
                raise
            exchange.resent, exchange.sent_at, exchange.response = True, None, None
            while self._kept:
                self._kept.pop().abort()
        began = clock()
        addresses = await self._connector.look_up(exchange)
        end += clock() - began
        connection = await self._connector.connect(addresses, exchange, end - clock())
        return await self._send(connection, exchange, request, end)

    async def _send(self, connection: HttpConnection, exchange: Exchange, request: bytes, end: float) -> None:
        try:
            async with asyncio.timeout_at(end):
                await connection.send(exchange, request)
        finally:
            connection.kept_at = time.monotonic()
            if _is_reusable(connection):
                self._kept.append(connection)
                self._sweep = self._sweep or asyncio.get_running_loop().call_later(KEPT_SECONDS, self._drop_old)
            else:
                connection.abort()

    def _take_kept(self) -> HttpConnection | None:
        """Return the connection used last, so that the others grow old and are dropped."""
        while self._kept:
            if _is_reusable(connection := self._kept.pop()):
                return connection
            connection.abort()
        return None

    def _drop_old(self) -> None:
        while self._kept and not _is_reusable(self._kept[0]):
            self._kept.popleft().abort()
        later = asyncio.get_running_loop().call_later
        self._sweep = later(KEPT_SECONDS, self._drop_old) if self._kept else None


def _is_reusable(connection: HttpConnection) -> bool:
    now = time.monotonic()
    return connection.reusable and now - connection.kept_at < KEPT_SECONDS and now - connection.made_at < AGE_SECONDS
