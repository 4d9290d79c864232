"""One connection to a destination, which carries one exchange after the other."""

from __future__ import annotations

import asyncio
import select
import ssl
import time

from outbox_relay.sinks.webhook.exchange import ConnectionLost, Exchange, ExchangeFailed, NotConnected

BODY_SECONDS = 1.0
"""Maximum time for reading a body after its head, which has decided the result already."""
LOOKS = 16
"""Turns of the event loop in which unread bytes are read before a request is sent, at most."""


class HttpConnection(asyncio.Protocol):
    """A connection. It can carry another exchange once the last one was sent whole and its response ended exactly."""

    _transport: asyncio.Transport
    _done: asyncio.Future[None]

    def __init__(self) -> None:
        self.made_at = time.monotonic()
        self._poll = select.poll()  # select() itself knows no file descriptors above 1023
        self._exchange: Exchange | None = None
        self._body_limit: asyncio.TimerHandle | None = None
        self._idle = True
        self._spoke = False
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
        self._done = asyncio.get_running_loop().create_future()
        try:
            await self._done
        finally:
            self._exchange = None
            if self._body_limit is not None:
                self._body_limit.cancel()
                self._body_limit = None

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
        """Read a response. Without a request there is none, and the connection ends."""
        exchange = self._exchange
        if exchange is None:
            self._spoke = True
            self.abort()
            return
        try:
            exchange.receive(data)
        except ExchangeFailed as error:
            self._end(error)
            return
        if exchange.response.ended:
            self._idle = exchange.response.ended_exactly
            self._end()
        elif exchange.response.status and self._body_limit is None:
            self._body_limit = asyncio.get_running_loop().call_later(BODY_SECONDS, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: a body without a length ends with its connection."""
        self._error = exc
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.response.status:
            if exc is None:
                exchange.response.feed_end()
            self._end()
        else:
            self._end(self._failure(exchange))

    def _end(self, error: ExchangeFailed | None = None) -> None:
        """End the exchange with its response or ``error``, and the connection unless it can carry another one."""
        self._exchange = None
        if not self._idle:
            self.abort()
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    def _failure(self, exchange: Exchange) -> ExchangeFailed:
        """Return what ended the connection. With TLS 1.3 a server refuses a certificate only after the handshake."""
        if isinstance(self._error, ssl.SSLError) and exchange.first_byte is None:
            reason = self._error.reason or "closed"
            if exchange.dialled and "ALERT" in reason:
                exchange.reject()
            return ExchangeFailed("tls_error", f"the destination ended TLS: {reason}")
        if isinstance(self._error, OSError):
            return ConnectionLost("connection_reset", "the connection was reset")
        return ConnectionLost("disconnected", "the connection was closed before the response was complete")
