"""One connection: aiohttp's parser and flow control, watched until the head of an answer is there."""

from __future__ import annotations

import asyncio
import time

from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError
from aiohttp.http_parser import RawResponseMessage

from outbox_relay.sinks.webhook.trip import Disconnected, Trip

HEAD_BYTES = 100 * 1024
"""Longest status line and headers of an answer, interim answers before it included."""
HEADERS = 512
"""Header lines of an answer, at most."""
STATUS_LINE_BYTES = 8 * 1024
INTERIM_ANSWERS = 32
"""Interim answers (status 1xx) before the final one that one read may bring, at most."""
READ_BYTES = 16 * 1024
"""Bytes of a body that wait unread, about, before the connection is read no further."""
_END = b"\r\n\r\n"
_BEGIN = b"HTTP/1."
_STATUS_AT = len("HTTP/1.1 ")
_INTERIM, _FINAL = 100, 200
_SWITCHING_PROTOCOLS = 101
_MAJOR_VERSION = 1


class Wire(ResponseHandler):
    """A connection, which carries one request after the other. Closing it drops what is not on its way yet.

    The parser gets the head of an answer and its body one after the other: in one piece, an error in the body would
    take the head with it, and a complete head decides, whatever the body is.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wires: set[Wire]) -> None:
        super().__init__(loop)
        self._wires = wires
        self._trip: Trip | None = None
        self._headed = False
        self._head_bytes = 0
        self._opening = b""
        self._seam = b""
        self._body: StreamReader | None = None
        self.lost: BaseException | None = None
        """What broke it, if anything did."""
        self.refusal: str | None = None
        """Why its answer was not read any further."""
        self.kept_since = 0.0
        """When its last answer ended, a value of ``time.monotonic()``."""

    @property
    def reusable(self) -> bool:
        """Whether it can carry another request: everything of the last one is sent and its answer ended."""
        transport = self.transport
        return transport is not None and self.is_connected() and not (self.should_close or _unsent(transport))

    async def ask(self, trip: Trip, request: bytes) -> tuple[RawResponseMessage, StreamReader]:
        """Send ``request`` and wait for the head of its answer; the body is read from what comes with it.

        Raises what the library raises: aiohttp.ServerDisconnectedError when the connection was closed, OSError when it
        was reset, HttpProcessingError when the answer is none.
        """
        self._trip = trip
        self._headed, self._head_bytes, self._opening, self._seam = False, 0, b"", b""
        self.set_response_params(
            read_until_eof=True,
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            max_line_size=STATUS_LINE_BYTES,
            max_field_size=HEAD_BYTES,
            max_headers=HEADERS,
        )
        trip.sent_at = time.monotonic()
        if self.transport is not None:
            self.transport.write(request)
        message, body = await self.read()
        while (refusal := _refusal(message)) is None and message.code < _FINAL:
            message, body = await self.read()
        if refusal is not None:
            raise self._refuse(refusal)
        self._body = body
        self._tell_reader()
        return message, body

    def put_down(self) -> None:
        """Forget the request: what comes without one is no answer."""
        self._trip = self._body = None
        self._headed = False
        self.kept_since = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Enter it where all connections are known."""
        self._wires.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Keep what broke it."""
        self._wires.discard(self)
        self.lost = exc
        super().connection_lost(exc)
        self._tell_reader()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Go on reading; the library asks for it after every piece, paused or not."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def data_received(self, data: bytes) -> None:
        """Pass an answer on, its head before its body. Without a request there is none, and the connection ends."""
        if data and not self._headed:
            trip = self._trip
            if trip is None:
                self.abort()
                return
            if trip.first_byte is None:
                trip.first_byte = time.monotonic()
            data = self._pass_heads(data)
            if not data:
                return
        super().data_received(data)

    def _pass_heads(self, data: bytes) -> bytes:
        """Pass on interim heads and the final one; the rest of ``data``, which is the body's, is returned."""
        if data.count(_BEGIN) > INTERIM_ANSWERS:
            self._refuse(f"more than {INTERIM_ANSWERS} interim answers came at once")
            return b""
        while data:
            end = self._end(data)
            piece, data = (data[:end], data[end:]) if end else (data, b"")
            self._head_bytes += len(piece)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(f"status line and headers are longer than {HEAD_BYTES // 1024} KiB")
                return b""
            if len(self._opening) <= _STATUS_AT:
                self._opening = (self._opening + piece)[: _STATUS_AT + 1]
            super().data_received(piece)
            if end:
                self._headed = self._opening[_STATUS_AT:] != b"1"
                self._opening = self._seam = b""
                if self._headed:
                    return data
            else:
                self._seam = (self._seam + piece)[1 - len(_END) :]
        return b""

    def _end(self, data: bytes) -> int:
        """Where in ``data`` the body begins: after the blank line, which may have begun in earlier data; 0: not yet."""
        if self._seam:
            found = (self._seam + data[: len(_END) - 1]).find(_END)
            if found >= 0:
                return found + len(_END) - len(self._seam)
        return data.find(_END) + len(_END) if _END in data else 0

    def _refuse(self, why: str) -> HttpProcessingError:
        self.refusal = why
        if self.transport is not None:
            self.transport.abort()
        error = BadHttpMessage(why)
        self.set_exception(error)
        return error

    def _tell_reader(self) -> None:
        """Tell who reads the body when it breaks off: the library does so only for some of the ways."""
        body = self._body
        broken = self.exception() is not None or not self.is_connected()
        if broken and body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(Disconnected("the body broke off"))


def _refusal(message: RawResponseMessage) -> str | None:
    """Why ``message`` is neither an answer nor an interim one, though the parser read it."""
    if message.version.major != 1:
        return "the answer is of another version of HTTP"
    if message.code < _INTERIM:
        return "the answer's status is below 100"
    if message.code == _SWITCHING_PROTOCOLS:
        return "the answer switches to another protocol"
    return None


def _unsent(transport: asyncio.Transport) -> bool:
    return transport.get_write_buffer_size() > 0
