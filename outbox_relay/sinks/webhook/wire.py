"""One connection: aiohttp's parser and flow control, watched until the head of an answer is there."""

from __future__ import annotations

import asyncio
import re
import select
import time

from aiohttp import ServerDisconnectedError, StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError
from aiohttp.http_parser import RawResponseMessage

from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.sinks.webhook.trip import Disconnected, NotConnected, Trip, Withdrawn

HEAD_BYTES = 100 * 1024
"""Longest status line and headers of an answer, interim answers before it included."""
HEADERS = 512
"""Header lines of an answer, at most."""
STATUS_LINE_BYTES = 8 * 1024
INTERIM_ANSWERS = 32
"""Interim answers (status 1xx) before the final one that one read may bring, at most."""
READ_BYTES = 16 * 1024
"""Bytes of a body that wait unread, about, before the connection is read no further."""
LOOKS = 16
"""Turns of the event loop in which what a connection holds unread is read before a request is sent, at most."""
_END = b"\r\n\r\n"
_BARE_LF = re.compile(rb"(?<!\r)\n")
_SPACE_BEFORE_COLON = re.compile(rb"\r\n[^ \t\r\n:][^\r\n:]*[ \t]:")
_WITHOUT_BODY = frozenset((204, 304))
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
        self._head = bytearray()
        self._behind = 0
        self._last = b""
        self._expected: int | None = None
        self._body: StreamReader | None = None
        self._spoke = False
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
        return (
            transport is not None
            and self.is_connected()
            and not (self.should_close or _unsent(transport))
            and self._ended_exactly()
        )

    def _ended_exactly(self) -> bool:
        """Whether nothing came behind the answer: the parser forgets the beginning of another one.

        A body in chunks ends with an empty line, and what follows a whole answer would end with one only if it were
        another head, which the parser keeps.
        """
        return self._behind == self._expected if self._expected is not None else self._last == _END

    async def ask(self, trip: Trip, request: bytes) -> tuple[RawResponseMessage, StreamReader]:
        """Send ``request`` and wait for the head of its answer; the body is read from what comes with it.

        Raises what the library raises: aiohttp.ServerDisconnectedError when the connection was closed, OSError when it
        was reset, HttpProcessingError when the answer is none. Raises NotConnected when a new connection holds an
        answer before the request was sent, and Withdrawn when the time to send it is over by then.
        """
        await self._expect_silence(trip)
        self._trip = trip
        self._headed, self._head_bytes, self._behind, self._last = False, 0, 0, b""
        self._expected = 0
        self._head.clear()
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
        self._expected = _length(message)
        self._tell_reader()
        return message, body

    async def _expect_silence(self, trip: Trip) -> None:
        """Read what the connection holds before anything is asked: it is no answer, and nothing is sent over it.

        A kept connection counts as closed, so that the request goes out over another one.
        """
        looks = 0
        while (waits := self._holds_unread()) and looks < LOOKS:
            looks += 1
            await asyncio.sleep(0)  # in one of the next turns the loop reads it, or sees the end
        if waits or self._spoke:
            self.abort()
            if trip.dialled:
                raise NotConnected("protocol_error", "the destination answered before the request was sent")
        if not self.is_connected() or self._spoke:
            raise ServerDisconnectedError
        if looks and (trip.withdrawn or lease_clock() >= trip.until):
            trip.withdrawn = True
            raise Withdrawn("called back")

    def _holds_unread(self) -> bool:
        """Whether the system has bytes, or the end, of this connection that the event loop has not read."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return False
        number = transport.get_extra_info("socket").fileno()
        if number < 0:
            return False
        poll = select.poll()  # select() itself knows no numbers above 1023
        poll.register(number, select.POLLIN)
        return bool(poll.poll(0))

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
                self._spoke = True
                self.abort()
                return
            if trip.first_byte is None:
                trip.first_byte = time.monotonic()
            data = self._pass_heads(data)
            if not data:
                return
        self._behind += len(data)
        self._last = (self._last + data[-len(_END) :])[-len(_END) :]
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
            seen = len(self._head)
            self._head += piece
            if (fault := _fault(self._head, seen, whole=bool(end))) is not None:
                self._refuse(fault)
                return b""
            super().data_received(piece)
            if end:
                self._headed = not self._head.startswith(b"1", _STATUS_AT)
                self._head.clear()
                if self._headed:
                    return data
        return b""

    def _end(self, data: bytes) -> int:
        """Where in ``data`` the body begins: after the blank line, which may have begun in earlier data; 0: not yet."""
        if seam := bytes(self._head[1 - len(_END) :]):
            found = (seam + data[: len(_END) - 1]).find(_END)
            if found >= 0:
                return found + len(_END) - len(seam)
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


def _fault(head: bytearray, seen: int, *, whole: bool) -> str | None:
    """Return why ``head``, whose first ``seen`` bytes were looked at, is none of an answer, though the parser takes it.

    Lines end with CR and LF, and no blank stands before a header's colon (RFC 9112, sections 2.2 and 5.1): a relay that
    reads a head otherwise than those before it takes another answer for its own.
    """
    if _BARE_LF.search(head, seen):
        return "a line of the answer's head ends without CR"
    if whole and _SPACE_BEFORE_COLON.search(head):
        return "a blank stands before the colon of a header in the answer"
    return None


def _length(message: RawResponseMessage) -> int | None:
    """Return the bytes of the answer's body; None when it is in chunks or lasts until the connection ends."""
    if message.code in _WITHOUT_BODY:
        return 0
    length = message.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and not message.chunked else None


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
