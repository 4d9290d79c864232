"""Reading the response to a request, in bounds and in one way only."""

from __future__ import annotations

import re
from typing import Protocol

HEAD_BYTES = 100 * 1024
"""Longest status line and headers of a response."""
HEADER_CHARS = 512
"""Longest value of a header that is kept, in characters."""
INTERIM_RESPONSES = 32
"""Interim responses (status 1xx), at most."""
BODY_BYTES = 64 * 1024
"""Bytes of a body, its framing included, that are read, at most; a connection with more to read is closed."""
CHUNKS = 1024
"""Chunks of a body that are read, at most: each takes processor time, however short it is."""
PREFIX_BYTES = 4096
"""Longest beginning of a body that is kept, in bytes."""

_BEGIN = b"HTTP/1."
_END = b"\r\n\r\n"
_HEAD = re.compile(
    rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n\0]*+)?\r\n"
    rb"((?:[!#-'*+.0-9A-Z^-z|~-]++:[^\r\n\0]*+\r\n(?:[\t ][^\r\n\0]*+\r\n)*+)*+)\r\n"
)
"""A head of which every line is as RFC 9112 says; a line that begins with a blank continues the one before it."""
_FOLD = re.compile(rb"\r\n[\t ]+")
_FRAMING = re.compile(rb"(?im)^(content-length|transfer-encoding|connection):[\t ]*([^\r]*)")
_SHOWN = re.compile(rb"(?im)^(date|location|retry-after|webhook-delivery):[\t ]*([^\r]*)")
_LENGTH = re.compile(rb"([0-9]{1,18})(?:[\t ]*,[\t ]*\1)*")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(?:;.*)?")
_WITHOUT_BODY = (204, 304)
_NO_LINE = b"\n"
_INVALID = "the response is not valid HTTP/1.1"
_TOO_LONG = f"the response has a head longer than {HEAD_BYTES // 1024} KiB"


class Source(Protocol):
    """The source of a response. ``buffer`` has what came and is not read yet."""

    buffer: bytearray

    async def more(self) -> bool:
        """Wait until ``buffer`` has more. Return False if the connection has ended in good order. Raises its errors."""
        ...


class NotHttp(Exception):
    """The bytes are no response. The message holds nothing of them."""


class ResponseReader:
    """Reads one response from ``source``. ``status`` is 0 until its head is complete, which decides whatever follows.

    ``prefix`` is the beginning of the body as far as it was read, and ``whole`` is True once all of that was.
    """

    __slots__ = ("_chunked", "_headers", "_length", "_promised", "_source", "prefix", "status", "whole")

    def __init__(self, source: Source) -> None:
        self._source = source
        self.status = 0
        self.prefix = bytearray()
        self.whole = False
        self._headers = b""
        self._promised = False
        self._chunked = False
        self._length: int | None = None

    @property
    def ended_exactly(self) -> bool:
        """Return whether the connection may be kept: the response promised it, and nothing followed the body."""
        return self.whole and self._promised and not self._source.buffer

    def headers(self) -> dict[str, str]:
        """Return the headers that decide something if an event is not delivered, or help a person."""
        found: dict[str, str] = {}
        for raw_name, raw_value in _SHOWN.findall(self._headers):
            name, value = raw_name.lower().decode("ascii"), raw_value.decode("latin-1").rstrip("\t ")
            found[name] = (f"{found[name]}, {value}" if name in found else value)[:HEADER_CHARS]
        return found

    async def read_head(self) -> bool:
        """Read the head of the response, after interim ones. Return False if the connection ends before.

        Raises NotHttp, and what the source raises.
        """
        buffer = self._source.buffer
        for _ in range(INTERIM_RESPONSES + 1):
            while (head := _HEAD.match(buffer)) is None:
                _check(buffer)
                if not await self._source.more():
                    return False
            version, status, headers = head.groups()
            if head.end() > HEAD_BYTES:
                raise NotHttp(_TOO_LONG)
            del buffer[: head.end()]
            if status == b"101":
                raise NotHttp(_INVALID)
            if status >= b"200":
                self._take(int(status), headers, kept=version == b"1")
                return True
        raise NotHttp(f"more than {INTERIM_RESPONSES} interim responses came")

    def _take(self, status: int, headers: bytes, *, kept: bool) -> None:
        """Take the head, with what ends the body. Raises NotHttp if that can be read in two ways."""
        lengths: set[bytes] = set()
        encodings: list[bytes] = []
        self._headers = _FOLD.sub(b" ", headers) if _FOLD.search(headers) else headers
        for name, raw in _FRAMING.findall(self._headers):
            value = raw.rstrip(b"\t ").lower()
            match name.lower():
                case b"content-length":
                    length = _LENGTH.fullmatch(value)
                    lengths.add(length[1] if length else b"none")
                case b"transfer-encoding":
                    encodings.append(value)
                case _:
                    kept = kept and b"close" not in value
        if len(lengths) + len(encodings) > 1 or b"none" in lengths:
            raise NotHttp("the response has more than one length, or an invalid one")
        if encodings and encodings != [b"chunked"]:
            raise NotHttp("the response has an encoding that was not asked for")
        if status in _WITHOUT_BODY:
            self._length = 0
        elif lengths:
            self._length = int(lengths.pop())
        self._chunked = bool(encodings) and status not in _WITHOUT_BODY
        self._promised = kept
        self.status = status

    async def read_body(self) -> None:
        """Read the body, within bounds. Raises what the source raises."""
        if self._chunked:
            self.whole = await self._read_chunks()
        elif self._length is None:
            self.whole = not await self._read(BODY_BYTES + 1)
        else:
            self.whole = await self._read(min(self._length, BODY_BYTES)) and self._length <= BODY_BYTES

    async def _read(self, length: int) -> bool:
        """Read ``length`` bytes of the body. Return False if the connection ends before."""
        buffer = self._source.buffer
        while True:
            piece = buffer[:length]
            del buffer[:length]
            self.prefix += piece[: max(0, PREFIX_BYTES - len(self.prefix))]
            length -= len(piece)
            if not length or not await self._source.more():
                return not length

    async def _read_chunks(self) -> bool:
        """Read a body in chunks. Return False if it is broken, too long or cut."""
        room = BODY_BYTES
        for _ in range(CHUNKS):
            line = await self._read_line()
            chunk = _CHUNK.fullmatch(line)
            if chunk is None:
                return False
            size = int(chunk[1], 16)
            if not size:
                while line := await self._read_line():
                    room -= len(line)
                    if line == _NO_LINE or room < 0:
                        return False
                return True
            room -= size + len(line)
            if room < 0:
                await self._read(min(size, PREFIX_BYTES))
                return False
            if not await self._read(size) or await self._read_line():
                return False
        return False

    async def _read_line(self) -> bytes:
        """Return the next line, or ``_NO_LINE`` if the connection ends before it does, or if it is too long."""
        buffer = self._source.buffer
        while (end := buffer.find(b"\r\n")) < 0:
            if len(buffer) > PREFIX_BYTES or not await self._source.more():
                return _NO_LINE
        line = bytes(buffer[:end])
        del buffer[: end + 2]
        return line


def _check(head: bytearray) -> None:
    """Raise NotHttp if ``head``, which is not complete, cannot become one.

    Lines end with CR and LF (RFC 9112, section 2.2): a relay that reads a head otherwise than the servers before it
    takes another response for its own.
    """
    if not _BEGIN.startswith(head[: len(_BEGIN)]):
        raise NotHttp("the response is not HTTP/1.1")
    if _END in head or head.count(b"\n") != head.count(b"\r\n"):
        raise NotHttp(_INVALID)
    if len(head) > HEAD_BYTES:
        raise NotHttp(_TOO_LONG)
