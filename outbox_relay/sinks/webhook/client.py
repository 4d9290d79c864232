"""The HTTP client of a webhook sink: from headers and bytes, within a time limit, to a response or the lack of one.

Connections, the reading and the writing are made here with asyncio alone, because the clients that exist let a sink
down in one of these: one time limit covers everything, a cancelled request ends one connection and nothing else, heads
are bounded and read in one way only, a complete head decides, the clock is asked right before a request is written, and
each connection goes to an address that was judged.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from urllib.parse import quote, urlsplit

from outbox_relay.sinks.tls import Tls
from outbox_relay.sinks.webhook.connection import ConnectionLost, Exchange, ExchangeFailed, HttpConnection
from outbox_relay.sinks.webhook.connector import Connector, Proxy, header_lines
from outbox_relay.sinks.webhook.results import NoResponse, Response

KEPT_SECONDS = 4.0
"""Time for which a connection without a request may carry another. Many servers close theirs after 5 s."""
AGE_SECONDS = 60.0
"""Age from which a connection carries no further request.

The next connection looks the name up again, so that requests follow a name that moves.
"""
_OWN_HEADERS = frozenset(("host", "content-length"))
_SENT_RAW = "!#$%&'()*+,-./:;=?@[]^_|~"
"""Characters of a path and a query that are not escaped, besides letters and digits."""


class HttpClient:
    """Posts to one URL, over connections that are kept for a while between requests: one for each request at a time.

    ``url`` has been checked with the settings. ``denied`` returns why an address may not be dialled, or None, and
    ``own`` lists the relay's own addresses and ports, which are never dialled; both are asked for each new connection,
    for every address of the URL's host. ``tls`` is the context for https; by default the system's authorities are
    trusted. With ``proxy`` every connection goes through it, and it judges addresses.
    """

    def __init__(
        self,
        *,
        url: str,
        denied: Callable[[str], str | None],
        own: Callable[[], Collection[tuple[str, int]]] = tuple,
        tls: ssl.SSLContext | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        parts = urlsplit(url)
        https, host = parts.scheme == "https", parts.hostname or ""
        default_port = 443 if https else 80
        self._connector = Connector(
            host,
            parts.port or default_port,
            denied=denied,
            own=own,
            tls=(tls or Tls().context()) if https else None,
            proxy=proxy,
        )
        target = quote(f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}", safe=_SENT_RAW)
        named = f"[{host}]" if ":" in host else host.rstrip(".")
        port = f":{parts.port}" if parts.port not in (None, default_port) else ""
        self._start = f"POST {target} HTTP/1.1\r\nhost: {named}{port}\r\n"
        self._used: set[HttpConnection] = set()
        self._kept: deque[HttpConnection] = deque()
        """Those without a request, the one used last at the end."""
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def lookup_seconds(self) -> float:
        """The longest time that a request takes beyond its limit, to look up the host's name."""
        return self._connector.lookup_seconds

    async def post(
        self, headers: Sequence[tuple[str, str]], body: bytes, seconds: float, until: float = math.inf
    ) -> Response | NoResponse:
        """Post ``body`` with ``headers`` within ``seconds``, the end of the response included, but no look-up.

        Nothing is sent from ``until`` on, a ``lease_clock()`` value: such a request is withdrawn. ``host`` and
        ``content-length`` are added, nothing else is. A request that met a kept connection which the destination had
        closed is sent once more at once, over a new one. Raises for cancellation only.
        """
        exchange, failure = Exchange(until), None
        try:
            lines = header_lines([each for each in headers if each[0].lower() not in _OWN_HEADERS])
            request = f"{self._start}{lines}content-length: {len(body)}\r\n\r\n".encode("ascii") + body
            await self._exchange(exchange, request, seconds)
        except Exception as error:  # a request that cannot be made must not end the relay
            failure = error
        seconds, read = time.monotonic() - exchange.began, exchange.response
        if read is None or not read.status:
            code, reason = _why(exchange, failure, f"{seconds:.1f} s")
            sent = exchange.resent or exchange.sent_at is not None
            return NoResponse(code, sent, reason, seconds, exchange.timings())
        shown = {} if 200 <= read.status <= 299 else read.headers()
        return Response(read.status, shown, bytes(read.prefix), seconds, exchange.timings(), read.whole)

    async def _exchange(self, exchange: Exchange, request: bytes, seconds: float) -> None:
        """Send over a kept connection, or else over a new one."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        try:
            if (connection := self._take_kept()) is not None:
                async with asyncio.timeout_at(end):
                    return await self._send(connection, exchange, request)
        except ConnectionLost:
            if exchange.first_byte is not None:
                raise
            exchange.start_again()
            self._drop_kept()
        began = clock()
        addresses = await self._connector.look_up(exchange)
        async with asyncio.timeout_at(end + clock() - began):
            return await self._send(await self._connector.connect(addresses, exchange), exchange, request)

    async def _send(self, connection: HttpConnection, exchange: Exchange, request: bytes) -> None:
        self._used.add(connection)
        try:
            await connection.send(exchange, request)
        finally:
            self._used.remove(connection)
            if _is_reusable(connection):
                self._keep(connection)
            else:
                connection.abort()

    async def check(self) -> None:
        """Connect, shake hands and listen for a while. Posts nothing. Raises ExchangeFailed; each step has a limit."""
        exchange = Exchange()
        connection = await self._connector.connect(await self._connector.look_up(exchange), exchange)
        try:
            await connection.listen()
        finally:
            connection.abort()

    async def reset(self) -> None:
        """End every connection, at once, and look the host's name up again for the next one."""
        for connection in self._used:
            connection.abort()
        self._drop_kept()
        self._connector.forget()

    # -- kept connections ---------------------------------------------------------------------------------------

    def _take_kept(self) -> HttpConnection | None:
        """Return the connection used last, so that the others grow old and are dropped."""
        while self._kept:
            connection = self._kept.pop()
            if _is_reusable(connection) and time.monotonic() - connection.kept_at < KEPT_SECONDS:
                return connection
            connection.abort()
        return None

    def _keep(self, connection: HttpConnection) -> None:
        connection.kept_at = time.monotonic()
        self._kept.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._drop_old)

    def _drop_kept(self) -> None:
        while self._kept:
            self._kept.pop().abort()

    def _drop_old(self) -> None:
        oldest = time.monotonic() - KEPT_SECONDS
        while self._kept and self._kept[0].kept_at <= oldest:
            self._kept.popleft().abort()
        self._sweep = None
        if self._kept:
            self._sweep = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._drop_old)


def _is_reusable(connection: HttpConnection) -> bool:
    return connection.reusable and time.monotonic() - connection.made_at < AGE_SECONDS


def _why(exchange: Exchange, error: Exception | None, limit: str) -> tuple[str, str]:
    """Return the code of what happened, and a line for people."""
    if isinstance(error, ExchangeFailed):
        return error.code, error.reason
    if not isinstance(error, TimeoutError):
        return "internal", f"the request could not be made: {type(error).__name__}"
    match exchange.phase:
        case "connect":
            return "connect_timeout", f"no connection was made within {limit}"
        case "tls":
            return "connect_timeout", f"the TLS handshake was not done within {limit}"
        case _ if exchange.first_byte is None:
            return "read_timeout", f"no response within {limit}"
        case _:
            return "deadline", f"the headers of the response were not complete within {limit}"
