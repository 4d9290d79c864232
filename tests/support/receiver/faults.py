"""Faults of a receiver, each as a small behaviour over the raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import struct

from tests.support.receiver.answers import Behaviour, head, raw, say
from tests.support.receiver.request import Request

FOR_EVER = 3600.0
CHUNKED = ("transfer-encoding", "chunked")


async def hang(_request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take whatever comes, say nothing, and leave the connection open until the peer leaves."""
    await reader.read()
    writer.close()


async def stall(_request: Request, _reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Stop reading and writing."""
    await asyncio.sleep(FOR_EVER)


async def close(_request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close without a word."""
    writer.close()


async def reset(_request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a TCP reset."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def then(first: Behaviour, second: Behaviour) -> Behaviour:
    """Return a behaviour that does both, one after the other."""

    async def behave(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await first(request, reader, writer)
        await second(request, reader, writer)

    return behave


def drip(before: bytes, piece: bytes = b"x", seconds: float = 0.02) -> Behaviour:
    """Return a behaviour that sends ``before``, then ``piece`` again and again, with a pause each."""

    async def behave(_request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(before)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(seconds)

    return behave


class Flood:
    """`before`, then `piece` as fast as it is taken, until the peer goes away; `sent` counts the bytes of the flood."""

    def __init__(self, before: bytes, piece: bytes) -> None:
        self._before = before
        self._piece = piece
        self.sent = 0

    async def __call__(self, _request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Behave."""
        writer.write(self._before)
        while not writer.is_closing():
            writer.write(self._piece)
            await writer.drain()
            self.sent += len(self._piece)
            await asyncio.sleep(0)


header_drip = drip(b"HTTP/1.1 200 OK\r\nx-long: ")
"""A head that never ends, a byte at a time."""
body_drip = drip(head(200, [("content-length", "1000000000")]))
"""A 200 whose body never ends, a byte at a time."""
early_hints = Flood(b"", head(103, [("link", "</x>; rel=preload")]))
"""Informational answers without end."""
endless_chunks = Flood(head(200, [CHUNKED]), b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
"""A 200 whose chunked body never ends, as fast as it is taken."""
switching = raw(head(101, [("upgrade", "h2c"), ("connection", "upgrade")]))
"""Answer with an upgrade that was not requested."""
stale = then(say(200), close)
"""A 200 that promises to keep the connection, and closes it behind the answer."""

STATUS_LINES = {
    "status 0": b"HTTP/1.1 0 None\r\ncontent-length: 0\r\n\r\n",
    "status 99": b"HTTP/1.1 99 Odd\r\ncontent-length: 0\r\n\r\n",
    "status 999": b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
    "status 2000": b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n",
    "HTTP/0.9": b"<html>hello</html>\r\n",
    "HTTP/2.0": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "garbage": b"\x00\xff\x16\x03\x01 garbage \x1b[31m\r\n\r\n",
}
"""First lines that are no HTTP/1.1 answer, or a strange one; the connection is closed behind each."""

LENGTHS = {
    "two different lengths": [("content-length", "2"), ("content-length", "5")],
    "two equal lengths": [("content-length", "2"), ("content-length", "2")],
    "huge length": [("content-length", "9" * 30)],
    "length and chunked": [("content-length", "2"), CHUNKED],
    "chunked twice": [CHUNKED, CHUNKED],
}
"""Heads whose body has no honest length; each is sent with the body `ok` and closed."""


def gzip_bomb() -> bytes:
    """Return a response of 8 KiB whose body is 8 MiB when decoded."""
    packed = gzip.compress(bytes(8 << 20), 1)
    return head(200, [("content-encoding", "gzip"), ("content-length", str(len(packed)))]) + packed


BODIES = {
    "NUL": b"a\x00b",
    "ANSI escapes": b"\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "line breaks": b'one\r\ntwo\n{"level": "fatal"}\n',
    "right to left": "\u202egnp.exe".encode(),
}
"""Text of a hostile body, meant to disturb readers of a log or a page."""


def half_handshake(context: ssl.SSLContext) -> Behaviour:
    """Return a behaviour that sends half of the first flight of a TLS handshake and says nothing more."""

    async def behave(_request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = context.wrap_bio(incoming, outgoing, server_side=True)
        while not outgoing.pending:
            incoming.write(await reader.read(4096))
            with contextlib.suppress(ssl.SSLWantReadError):
                server.do_handshake()
        flight = outgoing.read()
        writer.write(flight[: len(flight) // 2])
        await writer.drain()
        await asyncio.sleep(FOR_EVER)

    return behave
