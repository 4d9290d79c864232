"""One connection to a destination, which carries one exchange after the other."""

from __future__ import annotations

import asyncio
import math
import select
import ssl
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress

from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks.webhook.response import NotHttp, ResponseReader

BODY_SECONDS = 1.0
"""Maximum time for reading a body after its head, which has decided the result already."""


class ExchangeFailed(Exception):
    """No response came. ``code`` is the word for it; ``reason`` is a line for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class ConnectionLost(ExchangeFailed):
    """The connection ended before the head of the response was complete."""


class Exchange:
    """A request and what has come back. Times are values of ``time.monotonic()``.

    ``until`` is the ``lease_clock()`` value from which the request must not be written. ``steps`` are the parts of
    making a connection and their seconds; a kept connection has none. ``sent_at`` is None unless the destination may
    have processed the request, and ``resent`` is True after that was sent over a kept connection that was found closed.
    """

    __slots__ = ("began", "first_byte", "resent", "response", "sent_at", "steps", "until")

    def __init__(self, until: float = math.inf) -> None:
        self.began = time.monotonic()
        self.until = until
        self.steps: list[tuple[str, float]] = []
        self.resent = False
        self.sent_at: float | None = None
        self.first_byte: float | None = None
        self.response: ResponseReader | None = None

    @contextmanager
    def timed(self, step: str) -> Generator[None]:
        """Record how long a step takes that does not fail."""
        began = time.monotonic()
        yield
        self.steps.append((step, time.monotonic() - began))

    def timings(self) -> tuple[tuple[str, float], ...]:
        """Return the steps and their seconds, first_byte included."""
        if self.sent_at is None or self.first_byte is None:
            return tuple(self.steps)
        return (*self.steps, ("first_byte", self.first_byte - self.sent_at))


class HttpConnection(asyncio.Protocol):
    """A connection. It can carry another exchange once the last one was sent whole and its response ended exactly."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self.made_at = self.kept_at = time.monotonic()
        self.buffer = bytearray()
        """The bytes that came and are not read yet."""
        self._poll = select.poll()  # select() itself knows no file descriptors above 1023
        self._exchange: Exchange | None = None
        self._news: asyncio.Future[None] | None = None
        self._patience_ends: float | None = None
        self._idle = True
        self._spoke = self._ended = False
        self._error: Exception | None = None

    @property
    def reusable(self) -> bool:
        """Return whether the connection can carry another exchange."""
        return self._idle and not self._transport.is_closing() and not self._transport.get_write_buffer_size()

    async def secure(self, context: ssl.SSLContext, host: str) -> None:
        """Continue over TLS, with a certificate for ``host``. Raises what the handshake raises."""
        start_tls = asyncio.get_running_loop().start_tls
        transport = await start_tls(self._transport, self, context, server_hostname=host)
        if transport is None:  # the connection ended right after the handshake
            self.abort()
        else:
            self._transport = transport

    async def send(self, exchange: Exchange, request: bytes, *, head_only: bool = False) -> ResponseReader:
        """Write ``request`` and return the response, which ``exchange`` has too, as far as it is read.

        Raises ConnectionLost, and ExchangeFailed: withdrawn, tls_error, and protocol_error, also when a new connection
        brings bytes before the request is sent.
        """
        await self._expect_silence(exchange)
        self._idle = False
        if lease_clock() >= exchange.until:
            raise ExchangeFailed("withdrawn", "its lease ended before it was sent")
        exchange.sent_at = time.monotonic()  # nothing may be awaited between the look at the lease and the writing
        self._transport.write(request)
        self._exchange = exchange
        response = exchange.response = ResponseReader(self.buffer, self.more)
        try:
            if not await response.read_head():
                raise self._failure(exchange)
            if not head_only:
                self._patience_ends = asyncio.get_running_loop().time() + BODY_SECONDS
                with suppress(TimeoutError, ExchangeFailed):  # the head has decided
                    await response.read_body()
                self._idle = response.ended_exactly
        except NotHttp as error:
            raise ExchangeFailed("protocol_error", str(error)) from None
        finally:
            self._exchange = self._patience_ends = None
        return response

    async def listen(self) -> None:
        """Wait until the destination ends the connection. Raises why."""
        while await self.more():
            pass
        raise self._failure(Exchange())

    async def more(self) -> bool:
        """See ``ResponseReader``. Raises TimeoutError if nothing comes until the body was waited for long enough."""
        if not self._ended:
            self._news = asyncio.get_running_loop().create_future()
            async with nullcontext() if self._patience_ends is None else asyncio.timeout_at(self._patience_ends):
                await self._news
            return True  # if the connection has ended, the next call tells
        if self._error is not None:
            raise self._failure(self._exchange or Exchange())
        return False

    async def _expect_silence(self, exchange: Exchange) -> None:
        """Read what the connection holds before anything is asked: that is no response, and nothing is sent over it.

        On a kept connection it counts as closed, so that the request is sent over another one.
        """
        for _ in range(16):  # turns of the event loop, at most
            if self._spoke or self._transport.is_closing() or not self._poll.poll(0):
                break
            await asyncio.sleep(0)  # in one of them it reads what there is, or sees the end
        else:
            self._spoke = True
        if self._spoke:
            self.abort()
            if exchange.steps:
                raise ExchangeFailed("protocol_error", "the destination answered before the request was sent")
        if self._transport.is_closing():
            raise self._failure(exchange)

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
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _failure(self, exchange: Exchange) -> ExchangeFailed:
        """Return what ended the connection. With TLS 1.3 a server refuses a certificate only after the handshake."""
        if isinstance(self._error, ssl.SSLError) and exchange.first_byte is None:
            reason = self._error.reason or "closed"
            if exchange.steps and "ALERT" in reason:
                exchange.sent_at = None  # it ended the connection without taking the request
            return ExchangeFailed("tls_error", f"the destination ended TLS: {reason}")
        if isinstance(self._error, OSError):
            return ConnectionLost("connection_reset", "the connection was reset")
        return ConnectionLost("disconnected", "the connection was closed before the response was complete")
