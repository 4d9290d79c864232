"""A transport of httpx: writes requests, lets aiohttp's parser read the answers, raises httpx's exceptions."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator

import aiohttp
import httpx
from aiohttp import StreamReader
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EofStream

from outbox_relay.sinks.webhook.dial import Dialler
from outbox_relay.sinks.webhook.pool import Pool
from outbox_relay.sinks.webhook.trip import Disconnected, NotConnected, Trip
from outbox_relay.sinks.webhook.wire import Wire

_OWN_HEADERS = frozenset((b"host", b"content-length"))
_LOGGERS = ("aiohttp", "httpcore", "httpx")


class HttpTransport(httpx.AsyncBaseTransport):
    """Sends requests to one host, over at most ``connections`` connections made by ``dialler``.

    A request carries its trip in ``extensions["trip"]``. There is no limit of time in here: who waits for an answer
    cancels when there is none in time, which ends the connection and nothing else. Nothing is added to a request but
    ``host`` and ``content-length``; there are no redirects, cookies, proxies or decoders to turn off.
    """

    def __init__(self, dialler: Dialler, connections: int) -> None:
        for name in _LOGGERS:  # at INFO and below they print URLs
            logging.getLogger(name).setLevel(logging.WARNING)
        self._pool = Pool(dialler, connections)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` and wait for the head of its answer; the body is read through the answer's stream.

        Raises NotConnected, Withdrawn, Disconnected, httpx.ReadError when the connection was reset,
        httpx.RemoteProtocolError when the answer is none, httpx.LocalProtocolError when the request cannot be written.
        """
        trip: Trip = request.extensions["trip"]
        stream = request.stream
        text = _written(request, stream.content if isinstance(stream, Content) else await request.aread())
        wire = await self._pool.acquire(trip)
        try:
            message, content = await wire.ask(trip, text)
        except (aiohttp.ClientError, HttpProcessingError, EofStream, OSError) as error:
            failure = _translated(error, wire, trip)
            self._end(wire)
            raise failure from None
        except BaseException:
            self._end(wire)
            raise
        trip.ended = content.is_eof()
        return httpx.Response(message.code, headers=message.raw_headers, stream=_Body(content, wire, self._pool))

    def drop(self) -> None:
        """End every connection at once."""
        self._pool.drop()

    async def aclose(self) -> None:
        """End every connection."""
        self._pool.drop()

    def _end(self, wire: Wire) -> None:
        wire.abort()
        self._pool.release(wire)


class Content(httpx.AsyncByteStream):
    """The body of a request that is at hand whole."""

    __slots__ = ("content",)

    def __init__(self, content: bytes) -> None:
        self.content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.content


class _Body(httpx.AsyncByteStream, AsyncIterator[bytes]):
    """The body of an answer as it comes. Closing it gives the connection back, or ends it if there is more to read."""

    __slots__ = ("_content", "_pool", "_wire")

    def __init__(self, content: StreamReader, wire: Wire, pool: Pool) -> None:
        self._content = content
        self._wire: Wire | None = wire
        self._pool = pool

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = b"" if self._content.at_eof() else await self._content.readany()
        except (aiohttp.ClientError, OSError):
            raise Disconnected("the body broke off") from None
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            self._pool.release(wire)


def _written(request: httpx.Request, body: bytes) -> bytes:
    """The request as it goes out. Raises httpx.LocalProtocolError for a header that would end before its line does."""
    url = request.url
    headers = [pair for pair in request.headers.raw if pair[0].lower() not in _OWN_HEADERS]
    lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if not (lines.count(b"\r") == lines.count(b"\n") == len(headers)) or b"\0" in lines:
        raise httpx.LocalProtocolError("the request cannot be written: a header holds a line break or NUL")
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
        request.method.encode("ascii"),
        url.raw_path,
        url.netloc.replace(url.raw_host, url.raw_host.rstrip(b"."), 1),
        lines,
        len(body),
        body,
    )


def _translated(error: Exception, wire: Wire, trip: Trip) -> httpx.TransportError:
    """The exception of httpx for one of the library's, whose texts hold pieces of answers."""
    if isinstance(wire.lost, ssl.SSLError) and trip.first_byte is None:
        return _farewell(wire.lost, trip)
    if isinstance(error, HttpProcessingError):
        return httpx.RemoteProtocolError(wire.refusal or "the answer is no answer of HTTP/1.1")
    if isinstance(error, OSError) and not isinstance(error, aiohttp.ServerDisconnectedError):
        return httpx.ReadError("the connection was reset")
    return Disconnected("the connection was closed before the answer was complete")


def _farewell(error: ssl.SSLError, trip: Trip) -> httpx.TransportError:
    """What ended TLS after the handshake: with TLS 1.3 that is where a server says that it wants a certificate."""
    reason = error.reason or "closed"
    if "ALERT" in reason and trip.dialled:
        trip.sent_at = None  # the server has not accepted the connection
    return NotConnected("tls_error", f"the destination ended TLS: {reason}")
