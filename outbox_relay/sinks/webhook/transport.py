"""The HTTP transport of a webhook sink: from headers and bytes, within some seconds, to an answer or a fault.

Below it stands a transport of httpx (``engine``) over aiohttp's parser and a pool of our own. That was chosen by
measurement (``python -m tests.bench.webhooks``): with 500 requests under way to 100 hosts httpx's own transport spends
9 to 12 times the processor time of bare aiohttp on each request (46 times with 64 to one host) and falls below 1,500 a
second on one core; this one spends about as much as bare aiohttp does, which makes several thousand. With the pool and
the writing in our hands one limit of time covers everything, cancelling ends one connection and nothing else, heads
are bounded, and every dial goes through ``dial``.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import httpx

from outbox_relay.sinks.webhook.dial import Dialler
from outbox_relay.sinks.webhook.engine import Content, HttpTransport
from outbox_relay.sinks.webhook.trip import Disconnected, NotConnected, Trip
from outbox_relay.sinks.webhook.tunnel import Proxy

PREFIX_BYTES = 4096
"""Longest beginning of an answer's body that is kept, in bytes."""
BODY_BYTES = 64 * 1024
"""Bytes of an answer's body that are read, at most; a connection with more to read is closed."""
BODY_SECONDS = 1.0
"""How long a body is read, at most: the head has decided already."""
HEADER_CHARS = 512
"""Longest value of an answer's header that is kept, in characters."""
_KEPT_HEADERS = frozenset((b"content-type", b"date", b"location", b"retry-after", b"webhook-delivery"))


@dataclass(frozen=True, slots=True)
class Answer:
    """The destination answered with a complete status line and headers, whatever became of the body.

    ``headers`` are those that decide something or help a person (retry-after, date, location, webhook-delivery,
    content-type): lower-case names, values decoded as latin-1, repeated ones joined by ``", "``, clipped. ``prefix`` is
    the beginning of the body as it came, never decoded. ``steps`` are the seconds that dns, connect, tls and first_byte
    took, where they are known: a kept connection has first_byte only.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    prefix: bytes = b""
    seconds: float = 0.0
    steps: tuple[tuple[str, float], ...] = ()
    whole: bool = True
    """Whether the body came to its end; False when it was cut, dripped, broken or longer than what is read."""


@dataclass(frozen=True, slots=True)
class Fault:
    """There was no answer.

    ``code`` is one of dns_error, dns_timeout, connection_refused, connect_timeout, tls_error, ssrf_blocked,
    proxy_error, deadline, read_timeout, connection_reset, disconnected, protocol_error, withdrawn (``reset`` or
    ``close`` ended it), internal.
    ``sent`` tells whether the destination may have processed the request: False only when nothing of it was sent, not
    even over a kept connection that was found closed. ``reason`` is a line for people: no URL, no address that a name
    stands for, no secret.
    """

    code: str
    sent: bool
    reason: str
    seconds: float = 0.0
    steps: tuple[tuple[str, float], ...] = ()


class Transport:
    """Posts to one URL, over at most ``max_connections`` connections that are kept open between requests.

    ``url`` has been checked with the settings. ``denied`` tells why an address may not be dialled (None: it may), and
    ``own`` which addresses and ports are the relay's own, which are never dialled; both are asked for each new
    connection, for every address that the URL's host stands for. ``tls`` is the context for https; by default the
    system's authorities are trusted. With ``proxy`` every connection goes through it, and it judges addresses.
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
        self._url = httpx.URL(url)
        self._connections = max_connections
        https = self._url.scheme == "https"
        self._dialler = Dialler(
            self._url.raw_host.decode("ascii"),
            self._url.port or (443 if https else 80),
            denied=denied,
            own=own,
            tls=(tls or _default_tls()) if https else None,
            proxy=proxy,
        )
        self._engine: HttpTransport | None = None
        self._under_way: dict[Trip, asyncio.Timeout] = {}

    def renew(self, tls: ssl.SSLContext) -> None:
        """Use ``tls`` for new connections; those that are kept stay as they are."""
        self._dialler.renew(tls)

    async def open(self) -> None:
        """Make ready to post. Connects nowhere. Called again after ``close``."""
        if self._engine is None:
            self._dialler.forget()
            self._engine = HttpTransport(self._dialler, self._connections)

    async def post(
        self, headers: Sequence[tuple[str, str]], body: bytes, seconds: float, until: float = math.inf
    ) -> Answer | Fault:
        """Post ``body`` with ``headers``, all of it within ``seconds``, the answer's end included.

        Nothing is sent from ``until`` on, a ``lease_clock()`` value: such a request is withdrawn.
        ``host`` and ``content-length`` are added, nothing else is. A request that met a kept connection which the
        destination had closed goes out once more at once, over a new one. Raises RuntimeError when not open, else for
        cancellation only.
        """
        if self._engine is None:
            raise RuntimeError("the transport is not open")
        trip = Trip(until)
        try:
            async with asyncio.timeout(seconds) as limit:
                self._under_way[trip] = limit
                try:
                    response = await self._send(self._engine, trip, headers, body)
                    await _read(response, trip, limit)
                finally:
                    del self._under_way[trip]
        except Exception as error:  # a request that cannot be made must not end the relay
            if trip.response is None:
                return _fault(trip, error)
            response = trip.response
        return _answer(trip, response)

    async def reset(self) -> None:
        """Drop every connection and end every request under way; nothing of them is sent later."""
        now = asyncio.get_running_loop().time()
        for trip, limit in self._under_way.items():
            trip.withdrawn = True
            if not limit.expired():
                limit.reschedule(now)
        if self._engine is not None:
            self._engine.drop()

    async def close(self) -> None:
        """Do as ``reset`` does, for good. Without effect when not open."""
        await self.reset()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    async def _send(
        self, engine: HttpTransport, trip: Trip, headers: Sequence[tuple[str, str]], body: bytes
    ) -> httpx.Response:
        """Send, and once more where a kept connection was found closed; an answer whose body is to be read."""
        request = httpx.Request(
            "POST", self._url, headers=list(headers), stream=Content(body), extensions={"trip": trip}
        )
        try:
            return await engine.handle_async_request(request)
        except (Disconnected, httpx.ReadError):
            if trip.dialled or trip.first_byte is not None:
                raise
        trip.start()
        trip.fresh = True
        return await engine.handle_async_request(request)


@cache
def _default_tls() -> ssl.SSLContext:
    """One context for all: loading the system's authorities takes time and memory."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _shorten(limit: asyncio.Timeout) -> None:
    """Leave ``BODY_SECONDS`` at most for what is still to come."""
    end = asyncio.get_running_loop().time() + BODY_SECONDS
    when = limit.when()
    if when is not None and when > end and not limit.expired():
        limit.reschedule(end)


async def _read(response: httpx.Response, trip: Trip, limit: asyncio.Timeout) -> None:
    """Read the body, raw, into ``trip``, as far and as long as it is worth it."""
    trip.response = response
    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream)  # noqa: S101 - the engine makes no other
    if not trip.ended:
        _shorten(limit)
    read = 0
    try:
        async for chunk in stream:
            if read < PREFIX_BYTES:
                trip.prefix += chunk[: PREFIX_BYTES - read]
            read += len(chunk)
            if read > BODY_BYTES:
                return
        trip.whole = True
    finally:
        await stream.aclose()


def _answer(trip: Trip, response: httpx.Response) -> Answer:
    return Answer(
        response.status_code,
        _kept(response.headers.raw),
        bytes(trip.prefix),
        time.monotonic() - trip.began,
        trip.told(),
        trip.whole,
    )


def _kept(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        if lower in _KEPT_HEADERS:
            key, text = lower.decode("latin-1"), value.decode("latin-1")
            kept[key] = (f"{kept[key]}, {text}" if key in kept else text)[:HEADER_CHARS]
    return kept


def _fault(trip: Trip, error: Exception) -> Fault:
    code, reason = _named(trip, error)
    unsent = trip.sent_at is None or isinstance(error, httpx.LocalProtocolError)
    return Fault(code, trip.fresh or not unsent, reason, time.monotonic() - trip.began, trip.told())


def _named(trip: Trip, error: Exception) -> tuple[str, str]:
    """The code of what happened, and a line for people."""
    if trip.withdrawn:
        return "withdrawn", "called back before an answer came"
    match error:
        case NotConnected():
            return error.code, error.reason
        case TimeoutError():
            return _late(trip)
        case Disconnected():
            return "disconnected", str(error)
        case httpx.RemoteProtocolError():
            return "protocol_error", str(error)
        case httpx.ReadError():
            return "connection_reset", str(error)
        case httpx.LocalProtocolError():
            return "internal", str(error)
        case _:
            return "internal", f"the request could not be made: {type(error).__name__}"


def _late(trip: Trip) -> tuple[str, str]:
    seconds = f"{time.monotonic() - trip.began:.1f} s"
    if trip.phase == "dns":
        return "dns_timeout", f"the host's name was not looked up within {seconds}"
    if trip.phase == "connect":
        return "connect_timeout", f"no connection was made within {seconds}"
    if trip.phase == "tls":
        return "connect_timeout", f"the TLS handshake was not done within {seconds}"
    if trip.sent_at is None:
        return "deadline", f"no connection was free within {seconds}"
    if trip.first_byte is None:
        return "read_timeout", f"no answer within {seconds}"
    return "deadline", f"the answer's headers were not complete within {seconds}"
