"""Reading one response with h11, in bounds and in one way only. Pure: bytes in, facts out.

Most responses are short, come at once and say their length. They are read by one pattern, in a tenth of the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

import h11

HEAD_BYTES = 100 * 1024
"""Longest status line and headers of a response, interim responses before it included."""
HEADERS = 512
"""Header lines of a response, at most."""
HEADER_CHARS = 512
"""Longest value of a header that is kept, in characters."""
INTERIM_RESPONSES = 32
"""Interim responses (status 1xx) that one read may bring, at most."""
BODY_BYTES = 64 * 1024
"""Bytes of a body, its framing included, that are read, at most; a connection with more to read is closed."""
CHUNKS = 1024
"""Chunks of a body that one read may bring, at most: each takes processor time, however short it is."""
PREFIX_BYTES = 4096
"""Longest beginning of a body that is kept, in bytes."""
PLAIN_BYTES = 2048
"""Longest response that is read without h11. It has less than ``HEADERS`` header lines, and all of its body is kept."""
_PLAIN = re.compile(rb"HTTP/1\.1 ([2-5][0-9]{2})(?: [\t -~]*)?\r\n((?:[!#-'*+.0-9A-Z^-z|~-]+:[\t -~]*\r\n)*)\r\n")
"""A head of which every line is as RFC 9112 says, without bytes beyond ASCII and without continued lines."""
_KEPT_HEADERS = frozenset((b"content-type", b"date", b"location", b"retry-after", b"webhook-delivery"))
_LENGTH_AND_CHUNKS = {b"content-length", b"transfer-encoding"}
_BEGIN = b"HTTP/1."
_END = b"\r\n\r\n"
_REQUEST = h11.Request(method="POST", target="/", headers=[("host", "-")])
"""A stand-in that tells h11 of a request: the client makes the bytes, in a third of the time that h11 takes."""
_END_OF_REQUEST = h11.EndOfMessage()


class NotHttp(Exception):
    """The bytes are no response. The message holds nothing of them."""


class ResponseReader:
    """Reads one response. ``status`` is 0 until its head is complete, which decides whatever the body is.

    ``headers`` are those that are kept: names in lower case, values decoded as latin-1, repeated ones joined by
    ``", "``, clipped. ``prefix`` is the raw beginning of the body, and ``whole`` tells whether that came to its end.
    """

    __slots__ = ("_body_bytes", "_head", "_head_bytes", "_parser", "ended", "headers", "prefix", "status", "whole")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.prefix = bytearray()
        self.whole = False
        self.ended = False
        """True if the whole response has been read."""
        self._parser: h11.Connection | None = None  # made for a response that the pattern does not match
        self._head = b""
        self._head_bytes = self._body_bytes = 0

    @property
    def ended_exactly(self) -> bool:
        """Return whether the connection may be kept: the response promised it, and nothing followed the body."""
        if self._parser is None:
            return self.ended
        kept = self._parser.their_state is h11.DONE and self._body_bytes <= BODY_BYTES
        return self.whole and kept and not self._parser.trailing_data[0]

    def feed(self, data: bytes) -> None:
        """Read ``data``. Raises NotHttp until the head is complete; a broken body ends the response."""
        if self._parser is None:
            if self._read_plain(data):
                return
            self._parser = _parser()
        try:
            if not self.status:
                data = self._read_heads(self._parser, data)
            if self.status:
                self._read_body(self._parser, data)
        except h11.RemoteProtocolError:  # its text may hold pieces of the response
            if not self.status:
                raise NotHttp("the response is not valid HTTP/1.1") from None
            self.ended = True

    def feed_end(self) -> None:
        """Read the end of the connection, which ends a body without a length."""
        if (parser := self._parser) is None:
            return
        with suppress(h11.RemoteProtocolError):
            parser.receive_data(b"")
            self.whole = isinstance(parser.next_event(), h11.EndOfMessage)

    def _read_plain(self, data: bytes) -> bool:
        """Read ``data`` if it is a whole response that h11 would read in the same way; return False if not.

        That is one whose head matches the pattern and says the length of its body, with nothing after it. Of the
        headers that h11 acts upon, it has no other.
        """
        head = _PLAIN.match(data) if len(data) <= PLAIN_BYTES else None
        if head is None or head[1] == b"304":
            return False
        body = data[head.end() :]
        lengths = [b"0"] if head[1] == b"204" else []
        kept: list[tuple[bytes, bytes]] = []
        for line in head[2].splitlines():
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip(b" \t")
            if name in _KEPT_HEADERS:
                kept.append((name, value))
            elif name == b"content-length":
                lengths.append(value)
            elif name == b"transfer-encoding" or (name == b"connection" and value.lower() != b"keep-alive"):
                return False
        if lengths != [b"%d" % len(body)]:
            return False
        self._keep(int(head[1]), kept)
        self.prefix += body
        self.whole = self.ended = True
        return True

    def _read_heads(self, parser: h11.Connection, data: bytes) -> bytes:
        """Read interim heads and the final one, each by itself. Return the bytes that follow it."""
        for _ in range(INTERIM_RESPONSES + 1):
            head, end, data = (self._head + data).partition(_END)
            self._head = b"" if end else head
            self._check(head)
            if not end:
                return b""
            self._head_bytes += len(head)
            parser.receive_data(head + end)
            if isinstance(event := parser.next_event(), h11.Response):
                headers = list(event.headers)
                if dict(headers).keys() >= _LENGTH_AND_CHUNKS:
                    raise NotHttp("the response has both a length and chunks")
                self._keep(event.status_code, headers)
                return data
        raise NotHttp(f"more than {INTERIM_RESPONSES} interim responses came at once")

    def _check(self, head: bytes) -> None:
        """Raise NotHttp if ``head``, which may be incomplete, is not accepted although h11 would read it.

        Lines end with CR and LF (RFC 9112, section 2.2): a relay that reads a head otherwise than the servers before
        it takes another response for its own.
        """
        if not _BEGIN.startswith(head[: len(_BEGIN)]):
            raise NotHttp("the response is not HTTP/1.1")
        lines = head.count(b"\n")
        if lines != head.count(b"\r\n"):
            raise NotHttp("a line of the response's head ends without CR")
        if lines > HEADERS:
            raise NotHttp(f"the response has more than {HEADERS} headers")
        if self._head_bytes + len(head) > HEAD_BYTES:
            raise NotHttp(f"status line and headers are longer than {HEAD_BYTES // 1024} KiB")

    def _keep(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        for raw_name, raw_value in headers:
            if raw_name in _KEPT_HEADERS:
                name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
                kept = f"{self.headers[name]}, {value}" if name in self.headers else value
                self.headers[name] = kept[:HEADER_CHARS]
        self.status = status

    def _read_body(self, parser: h11.Connection, data: bytes) -> None:
        room = BODY_BYTES - self._body_bytes
        self._body_bytes += len(data)
        if data:
            parser.receive_data(data[:room])
        for _ in range(CHUNKS):
            event = parser.next_event()
            if not isinstance(event, h11.Data):
                self.whole = isinstance(event, h11.EndOfMessage)
                self.ended = self.whole or self._body_bytes > BODY_BYTES
                return
            self.prefix += event.data[: max(0, PREFIX_BYTES - len(self.prefix))]
        self.ended = True


def _parser() -> h11.Connection:
    """Return a parser that has been told of a request."""
    parser = h11.Connection(h11.CLIENT, HEAD_BYTES)
    parser.send(_REQUEST)
    parser.send(_END_OF_REQUEST)
    return parser
