"""The HTTP client of a webhook sink: from headers and bytes, within a time limit, to a response or the lack of one.

h11 reads the responses, but for the plain ones that ``reader`` matches. Connections, their pool and the writing are
made here with asyncio alone, because the clients that exist let a sink down in one of these: one time limit covers
everything, a cancelled request ends one connection and nothing else, heads are bounded and read in one way only, a
complete head decides, the clock is asked right before a request is written, and each connection goes to an address that
was judged.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from urllib.parse import quote, urlsplit

from outbox_relay.sinks.tls import Tls
from outbox_relay.sinks.webhook.connector import Connector, ProtocolT
from outbox_relay.sinks.webhook.exchange import ConnectionLost, Exchange, ExchangeFailed
from outbox_relay.sinks.webhook.pool import ConnectionPool
from outbox_relay.sinks.webhook.proxy import Proxy
from outbox_relay.sinks.webhook.response import NoResponse, Response

_OWN_HEADERS = frozenset(("host", "content-length"))
_SENT_RAW = "!#$%&'()*+,-./:;=?@[]^_|~"
"""Characters of a path and a query that are not escaped, besides letters and digits."""


class HttpClient:
    """Posts to one URL, over at most ``max_connections`` connections that are kept open between requests.

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
        max_connections: int,
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
        self._connections = max_connections
        self._pool: ConnectionPool | None = None
        self._under_way: set[Exchange] = set()

    def renew(self, tls: ssl.SSLContext) -> None:
        """Use ``tls`` from the next request on."""
        self._connector.renew(tls)
        if self._pool is not None:
            self._pool.renew()

    @property
    def lookup_seconds(self) -> float:
        """The longest time that a request takes beyond its limit, to look up the host's name."""
        return self._connector.lookup_seconds

    async def open(self) -> None:
        """Make ready to post. Connects nowhere. Called again after ``close``."""
        if self._pool is None:
            self._connector.forget()
            self._pool = ConnectionPool(self._connector, self._connections)

    async def post(
        self, headers: Sequence[tuple[str, str]], body: bytes, seconds: float, until: float = math.inf
    ) -> Response | NoResponse:
        """Post ``body`` with ``headers`` within ``seconds``, the end of the response included, but no look-up.

        Nothing is sent from ``until`` on, a ``lease_clock()`` value: such a request is withdrawn. ``host`` and
        ``content-length`` are added, nothing else is. A request that met a kept connection which the destination had
        closed is sent once more at once, over a new one. Raises RuntimeError when not open, else for cancellation only.
        """
        if self._pool is None:
            raise RuntimeError("the client is not open")
        exchange = Exchange(until)
        try:
            request = self._written(headers, body)
            async with asyncio.timeout(seconds) as exchange.limit:
                self._under_way.add(exchange)
                try:
                    await _send(self._pool, exchange, request)
                finally:
                    self._under_way.remove(exchange)
        except Exception as error:  # a request that cannot be made must not end the relay
            if not exchange.response.status:
                return _no_response(exchange, error)
        return _response(exchange)

    async def connect(self, protocol: Callable[[], ProtocolT]) -> ProtocolT:
        """Return a protocol of its own on a new connection, which is not kept. Raises as ``Connector.connect``."""
        return await self._connector.connect(protocol, Exchange())

    async def reset(self) -> None:
        """Drop every connection and end every request under way; nothing of them is sent later."""
        now = asyncio.get_running_loop().time()
        for exchange in self._under_way:
            exchange.withdraw(now)
        if self._pool is not None:
            self._pool.drop()

    async def close(self) -> None:
        """Do as ``reset`` does, for good. Without effect when not open."""
        await self.reset()
        self._pool = None

    def _written(self, headers: Sequence[tuple[str, str]], body: bytes) -> bytes:
        """Return the request's bytes. Raises ExchangeFailed for a header that would end before its line does."""
        kept = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in _OWN_HEADERS]
        lines = "".join(kept)
        if not (lines.count("\r") == lines.count("\n") == len(kept)) or "\0" in lines or not lines.isascii():
            raise ExchangeFailed("internal", "the request cannot be written: a header holds a line break or no ASCII")
        return f"{self._start}{lines}content-length: {len(body)}\r\n\r\n".encode("ascii") + body


async def _send(pool: ConnectionPool, exchange: Exchange, request: bytes) -> None:
    """Send, and once more where a kept connection was found closed."""
    try:
        await pool.send(exchange, request)
    except ConnectionLost:
        if exchange.dialled or exchange.first_byte is not None:
            raise
        exchange.start_again()
        await pool.send(exchange, request)


def _response(exchange: Exchange) -> Response:
    seconds, read = time.monotonic() - exchange.began, exchange.response
    return Response(read.status, read.headers, bytes(read.prefix), seconds, exchange.timings(), read.whole)


def _no_response(exchange: Exchange, error: Exception) -> NoResponse:
    seconds = time.monotonic() - exchange.began
    code, reason = _why(exchange, error, f"{seconds:.1f} s")
    sent = exchange.force_new_connection or exchange.sent_at is not None
    return NoResponse(code, sent, reason, seconds, exchange.timings())


def _why(exchange: Exchange, error: Exception, limit: str) -> tuple[str, str]:
    """Return the code of what happened, and a line for people."""
    if exchange.withdrawn:
        return "withdrawn", "withdrawn before a response came"
    if isinstance(error, ExchangeFailed):
        return error.code, error.reason
    if not isinstance(error, TimeoutError):
        return "internal", f"the request could not be made: {type(error).__name__}"
    match exchange.phase:
        case "connect":
            return "connect_timeout", f"no connection was made within {limit}"
        case "tls":
            return "connect_timeout", f"the TLS handshake was not done within {limit}"
        case _ if exchange.sent_at is None:
            return "deadline", f"no connection was free within {limit}"
        case _ if exchange.first_byte is None:
            return "read_timeout", f"no response within {limit}"
        case _:
            return "deadline", f"the headers of the response were not complete within {limit}"
