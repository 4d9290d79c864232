"""Answers of a receiver that behaves: statuses, headers, bodies, delays, and which answer when."""

from __future__ import annotations

import asyncio
import http
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from tests.support.receiver.request import Request

Behaviour: TypeAlias = Callable[[Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""An action at one point of an exchange, which handles the bytes itself.

When it returns and has not closed the writer, the exchange continues, after an answer with the next request.
"""

Headers = Iterable[tuple[str, str]]


def head(status: int, headers: Headers = (), reason: str | None = None) -> bytes:
    """Return a status line and headers with the empty line after them."""
    phrase = reason if reason is not None else _phrase(status)
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _phrase(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Odd"


def raw(*pieces: bytes, close: bool = False) -> Behaviour:
    """Exactly these bytes."""

    async def behave(_request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if close:
            writer.close()

    return behave


def say(status: int, *headers: tuple[str, str], body: bytes = b"") -> Behaviour:
    """Return a behaviour that sends a complete answer with its length; the connection stays open."""
    return raw(head(status, (*headers, ("content-length", str(len(body))))) + body)


def after(seconds: float, then: Behaviour) -> Behaviour:
    """Return a behaviour that does ``then`` after that time."""

    async def behave(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        await then(request, reader, writer)

    return behave


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Return these answers in turn, for any request; the last one is repeated."""
    left = list(behaviours)

    async def behave(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(request, reader, writer)

    return behave


def of_each(*behaviours: Behaviour) -> Behaviour:
    """Return these answers in turn for each webhook-id; the last one is repeated."""
    seen: Counter[str] = Counter()

    async def behave(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = min(seen[request.uid], len(behaviours) - 1)
        seen[request.uid] += 1
        await behaviours[place](request, reader, writer)

    return behave


def chosen(choose: Callable[[Request], Behaviour]) -> Behaviour:
    """Answer as `choose` returns for the request."""

    def behave(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None]:
        return choose(request)(request, reader, writer)

    return behave
