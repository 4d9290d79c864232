"""Reading the response to a request, in bounds and in one way only.

Never more lenient than h11: ``tests/webhook/fuzz.py`` compares both, and lists where this is stricter.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

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
_TEXT = rb"[^\0\n\v\f\r]*+"
_FIELDS = rb"((?:[!#-'*+.0-9A-Z^-z|~-]++:" + _TEXT + rb"\r\n(?:[\t ]" + _TEXT + rb"\r\n)*+)*+)\r\n"
"""Header lines and the empty one after them. A line that begins with a blank continues the one before it."""
_HEAD = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: " + _TEXT + rb")?\r\n" + _FIELDS)
_TRAILER = re.compile(_FIELDS)
_FOLD = re.compile(rb"\r\n[\t ]+")
_FRAMING = re.compile(rb"(?im)^(content-length|transfer-encoding|connection):[\t ]*([^\r]*)")
_SHOWN = re.compile(rb"(?im)^(date|location|retry-after|webhook-delivery):[\t ]*([^\r]*)")
_LENGTH = re.compile(rb"([0-9]{1,18})(?:[\t ]*,[\t ]*\1)*")
_CHUNK = re.compile(rb"[0-9A-Fa-f]{1,15}(?:;[^\n]*?)?[\t ]*\r\n")
_LINE_END = re.compile(rb"\r\n")
_CLOSE = re.compile(rb"(?:.*,)?[\t ]*close[\t ]*(?:,.*)?")
_INVALID = "the response is not valid HTTP/1.1"
_TOO_LONG = f"the response has a head longer than {HEAD_BYTES // 1024} KiB"


class NotHttp(Exception):
    """The bytes are no response. The message holds nothing of them."""


class ResponseReader:
    """Reads one response from ``buffer``, which has what came and is not read yet.

    ``more`` waits until it has more, and returns False if the connection has ended in good order. ``status`` is 0 until
    the head is complete, which decides whatever follows. ``prefix`` is the beginning of the body as far as it was read,
    and ``whole`` is True once all of that was.
    """

    __slots__ = ("_buffer", "_chunked", "_headers", "_length", "_more", "_promised", "prefix", "status", "whole")

    def __init__(self, buffer: bytearray, more: Callable[[], Awaitable[bool]]) -> None:
        self._buffer, self._more = buffer, more
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
        return self.whole and self._promised and not self._buffer

    def headers(self) -> dict[str, str]:
        """Return the headers that decide something if an event is not delivered, or help a person."""
        found: dict[str, str] = {}
        for raw_name, raw_value in _SHOWN.findall(self._headers):
            name, value = raw_name.lower().decode("ascii"), raw_value.decode("latin-1").rstrip("\t ")
            found[name] = (f"{found[name]}, {value}" if name in found else value)[:HEADER_CHARS]
        return found

    async def read_head(self) -> bool:
        """Read the head of the response, after interim ones. Return False if the connection ends before.

        Raises NotHttp, and what ``more`` raises.
        """
        buffer = self._buffer
        for _ in range(INTERIM_RESPONSES + 1):
            while (head := _HEAD.match(buffer)) is None:
                _check(buffer)
                if not await self._more():
                    return False
            version, status, headers = head.groups()
            if head.end() > HEAD_BYTES:
                raise NotHttp(_TOO_LONG)
            del buffer[: head.end()]
            self._take_headers(headers, kept=version == b"1")
            if status == b"101":
                raise NotHttp(_INVALID)
            if status >= b"200":
                self.status = int(status)
                if self.status in (204, 304):
                    self._chunked, self._length = False, 0
                return True
        raise NotHttp(f"more than {INTERIM_RESPONSES} interim responses came")

    def _take_headers(self, headers: bytes, *, kept: bool) -> None:
        """Take the headers, and what ends the body. Raises NotHttp if that can be read in two ways."""
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
                    kept = kept and _CLOSE.fullmatch(value) is None
        if len(lengths) + len(encodings) > 1 or b"none" in lengths:
            raise NotHttp("the response has more than one length, or an invalid one")
        if encodings and encodings != [b"chunked"]:
            raise NotHttp("the response has an encoding that was not asked for")
        self._length = int(lengths.pop()) if lengths else None
        self._chunked = bool(encodings)
        self._promised = kept

    async def read_body(self) -> None:
        """Read the body, within bounds. Raises what ``more`` raises."""
        if self._chunked:
            self.whole = await self._read_chunks()
        elif self._length is None:
            self._promised = False
            self.whole = not await self._read(BODY_BYTES + 1)
        else:
            self.whole = await self._read(min(self._length, BODY_BYTES)) and self._length <= BODY_BYTES

    async def _read(self, length: int) -> bool:
        """Read ``length`` bytes of the body. Return False if the connection ends before."""
        buffer = self._buffer
        while True:
            piece = buffer[:length]
            del buffer[:length]
            self.prefix += piece[: max(0, PREFIX_BYTES - len(self.prefix))]
            length -= len(piece)
            if not length or not await self._more():
                return not length

    async def _read_chunks(self) -> bool:
        """Read a body in chunks. Return False if it is broken, too long or cut."""
        room = BODY_BYTES
        for _ in range(CHUNKS):
            if (line := await self._take(_CHUNK, b"\r\n", PREFIX_BYTES)) is None:
                return False
            size = int(line.partition(b";")[0], 16)
            if not size:
                trailer = await self._take(_TRAILER, _END, room)
                return trailer is not None and _FRAMING.search(trailer) is None
            room -= size + len(line)
            if room < 0:
                await self._read(min(size, PREFIX_BYTES))
                return False
            if not await self._read(size) or await self._take(_LINE_END, b"\r\n", 2) is None:
                return False
        return False

    async def _take(self, pattern: re.Pattern[bytes], end: bytes, most: int) -> bytes | None:
        """Take what ``pattern`` matches off the buffer. Return None if it is broken, cut or longer than ``most``."""
        buffer = self._buffer
        while (found := pattern.match(buffer)) is None:
            if end in buffer or len(buffer) > most or not await self._more():
                return None
        taken = found[0]
        del buffer[: len(taken)]
        return taken


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
