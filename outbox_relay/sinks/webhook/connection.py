"""One connection to a destination, which carries one exchange after the other."""

from __future__ import annotations

import asyncio
import math
import select
import ssl
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks.webhook.response import NotHttp, ResponseReader

BODY_SECONDS = 1.0
"""Maximum time for reading a body after its head, which has decided the result already."""
LISTEN_SECONDS = 1.0
"""Time for which ``listen`` waits: a server with TLS 1.3 asks for a certificate after the handshake."""
LOOKS = 16
"""Turns of the event loop in which unread bytes are read before a request is sent, at most."""


class ExchangeFailed(Exception):
    """No response came. ``code`` is the word for it; ``reason`` is a line for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class NotConnected(ExchangeFailed):
    """No connection was made, so that nothing was sent."""


class ConnectionLost(ExchangeFailed):
    """The connection ended before the head of the response was complete."""


class Exchange:
    """A request and what has come back. Times are values of ``time.monotonic()``.

    ``until`` is the ``lease_clock()`` value from which the request must not be written. ``phase`` is dns, connect or
    tls while that is waited for. ``sent_at`` is None unless the destination may have processed the request, and
    ``resent`` is True after that was sent over a kept connection that was found closed.
    """

    __slots__ = ("began", "dialled", "first_byte", "phase", "resent", "response", "sent_at", "steps", "until")

    def __init__(self, until: float = math.inf) -> None:
        self.began = time.monotonic()
        self.until = until
        self.resent = False
        self._clear()

    def _clear(self) -> None:
        self.phase = ""
        self.steps: list[tuple[str, float]] = []
        self.dialled = False
        self.sent_at: float | None = None
        self.first_byte: float | None = None
        self.response: ResponseReader | None = None

    def start_again(self) -> None:
        """Forget the kept connection that was found closed."""
        self._clear()
        self.resent = True

    @contextmanager
    def timed(self, phase: str) -> Generator[None]:
        """Record how long a phase of making a connection takes; ``phase`` remains if it fails."""
        self.dialled = True
        self.phase = phase
        began = time.monotonic()
        yield
        self.steps.append((phase, time.monotonic() - began))
        self.phase = ""

    def begin_sending(self) -> None:
        """Record that the request is written now. Nothing may be awaited between this call and the writing.

        Raises ExchangeFailed when its lease has expired.
        """
        if lease_clock() >= self.until:
            raise ExchangeFailed("withdrawn", "its lease ended before it was sent")
        self.sent_at = time.monotonic()

    def timings(self) -> tuple[tuple[str, float], ...]:
        """Return the steps and their seconds, first_byte included."""
        if self.sent_at is None or self.first_byte is None:
            return tuple(self.steps)
        return (*self.steps, ("first_byte", self.first_byte - self.sent_at))


class HttpConnection(asyncio.Protocol):
    """A connection. It can carry another exchange once the last one was sent whole and its response ended exactly."""

    _transport: asyncio.Transport
    kept_at = 0.0
    """The ``time.monotonic()`` value since which it carries no exchange."""

    def __init__(self) -> None:
        self.made_at = time.monotonic()
        self.buffer = bytearray()
        """The bytes that came and are not read yet."""
        self._poll = select.poll()  # select() itself knows no file descriptors above 1023
        self._exchange: Exchange | None = None
        self._wakes: asyncio.Future[None] | None = None
        self._patience_ends: float | None = None
        self._idle = True
        self._spoke = self._ended = False
        self._error: Exception | None = None

    @property
    def reusable(self) -> bool:
        """Return whether the connection can carry another exchange."""
        return self._idle and not self._transport.is_closing() and not self._transport.get_write_buffer_size()

    async def send(self, exchange: Exchange, request: bytes) -> None:
        """Write ``request`` and wait until ``exchange`` has the response, as far as it is read.

        Raises NotConnected when a new connection brings bytes before the request is sent, ConnectionLost, and
        ExchangeFailed: withdrawn, protocol_error or tls_error.
        """
        await self._expect_silence(exchange)
        self._idle = False
        exchange.begin_sending()
        self._transport.write(request)
        self._exchange = exchange
        response = exchange.response = ResponseReader(self)
        try:
            if not await response.read_head():
                raise self._failure(exchange)
            self._patience_ends = asyncio.get_running_loop().time() + BODY_SECONDS
            with suppress(TimeoutError, ExchangeFailed):  # the head has decided
                await response.read_body()
            self._idle = response.ended_exactly
        except NotHttp as error:
            raise ExchangeFailed("protocol_error", str(error)) from None
        finally:
            self._exchange = self._patience_ends = None

    async def listen(self) -> None:
        """Send nothing for ``LISTEN_SECONDS`` if this is TLS 1.3. Raises as ``send`` if the destination ends it."""
        secure: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object")
        if secure is not None and secure.version() == "TLSv1.3":
            self._patience_ends = asyncio.get_running_loop().time() + LISTEN_SECONDS
            with suppress(TimeoutError):
                while await self.more():
                    pass
                raise self._failure(Exchange())

    async def more(self) -> bool:
        """See ``Source``. Raises TimeoutError if nothing comes until the body was waited for long enough."""
        if not self._ended:
            self._wakes = asyncio.get_running_loop().create_future()
            if self._patience_ends is None:
                await self._wakes
                return True  # if the connection has ended, the next call tells
            async with asyncio.timeout_at(self._patience_ends):
                await self._wakes
                return True
        if self._error is not None:
            raise self._failure(self._exchange or Exchange())
        return False

    async def _expect_silence(self, exchange: Exchange) -> None:
        """Read what the connection holds before anything is asked: that is no response, and nothing is sent over it.

        On a kept connection it counts as closed, so that the request is sent over another one.
        """
        looks = 0
        while self._holds_unread() and not self._spoke:
            looks += 1
            self._spoke = looks > LOOKS
            await asyncio.sleep(0)  # in one of the next turns the loop reads it, or sees the end
        if self._spoke:
            self.abort()
            if exchange.dialled:
                raise NotConnected("protocol_error", "the destination answered before the request was sent")
        if self._transport.is_closing():
            raise self._failure(exchange)

    def _holds_unread(self) -> bool:
        """Return whether the system has bytes of this connection, or its end, that the event loop has not read."""
        return not self._transport.is_closing() and bool(self._poll.poll(0))

    def abort(self) -> None:
        """End the connection at once, and drop what is not sent yet."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio passes no other for streams
        self._transport = transport
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Take what belongs to a response. Without a request there is none, and the connection ends."""
        if self._exchange is None:
            self._spoke = True
            self.abort()
            return
        if self._exchange.first_byte is None:
            self._exchange.first_byte = time.monotonic()
        self.buffer += data
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end of the connection."""
        self._error, self._ended = exc, True
        self._wake()

    def _wake(self) -> None:
        if self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    def _failure(self, exchange: Exchange) -> ExchangeFailed:
        """Return what ended the connection. With TLS 1.3 a server refuses a certificate only after the handshake."""
        if isinstance(self._error, ssl.SSLError) and exchange.first_byte is None:
            reason = self._error.reason or "closed"
            if exchange.dialled and "ALERT" in reason:
                exchange.sent_at = None  # it ended the connection without taking the request
            return ExchangeFailed("tls_error", f"the destination ended TLS: {reason}")
        if isinstance(self._error, OSError):
            return ConnectionLost("connection_reset", "the connection was reset")
        return ConnectionLost("disconnected", "the connection was closed before the response was complete")
