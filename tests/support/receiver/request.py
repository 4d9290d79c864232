"""One request as it came over the wire."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

HEAD_BYTES = 1 << 20
"""Longest head that is read; a request with a longer one is an error of the test."""


@dataclass(slots=True)
class Request:
    """A received request: the head in its order and spelling, the exact body, its time and its connection.

    `arrived` is a `time.monotonic()` value taken when the body was complete. `connection` numbers connections from 1,
    `turn` the requests of one connection. `problem` says why the signature did not verify, nothing when it did or when
    the receiver has no secret.
    """

    connection: int
    turn: int
    method: str = ""
    target: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    arrived: float = 0.0
    problem: str | None = None
    peer: dict[str, object] = field(default_factory=dict[str, object])
    """The client's certificate as Python tells it; empty without one."""

    def header(self, name: str) -> str | None:
        """Return the one header of this name, or None without one. Two are an error."""
        found = [value for own, value in self.headers if own.lower() == name]
        assert len(found) <= 1, f"{name} is there {len(found)} times"
        return found[0] if found else None

    @property
    def uid(self) -> str:
        """The header webhook-id; empty when there is none."""
        return self.header("webhook-id") or ""


async def read_head(reader: asyncio.StreamReader, request: Request) -> bool:
    """Read up to the empty line into `request`; False when the peer closed before it began."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return False
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    request.method, request.target, version = first.split(" ")
    assert version == "HTTP/1.1", version
    request.headers = tuple((name, value.strip()) for name, _, value in (line.partition(":") for line in lines))
    return True


async def read_body(reader: asyncio.StreamReader, request: Request) -> None:
    """Read as many bytes as the head announced. A body in chunks is an error: the sink knows its length."""
    assert request.header("transfer-encoding") is None, "a body in chunks"
    request.body = await reader.readexactly(int(request.header("content-length") or 0))
    request.arrived = time.monotonic()
