"""The HTTP listener: ``/livez`` for "restart me if this fails", ``/readyz`` for "I am doing my work".

Everything that a client can make it keep is bounded: connections, the bytes and the time of a head, the time of an
answer. A connection carries one request, and a request has no body. No server library bounds all of these, and none
is needed for two paths.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, cast

from structlog.stdlib import BoundLogger

MOST_CONNECTIONS = 64
"""Connections at once; for one more the oldest that has not sent a whole request is closed."""
HEAD_BYTES = 8192
"""The longest head of a request."""
HEAD_SECONDS = 5.0
"""How long a head may take to come, and an answer to go."""
REFUSED_SECONDS = 1.0
"""How long the rest of a refused request is thrown away, so that the client reads why."""
ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the event loop: all of them, and those of the next turn, fit in before one is
closed that had no turn to be read."""
QUEUE_CONNECTIONS = 1024
"""Connections that the kernel keeps for the listener; what overflows it is tried again by the client a second later."""
COMPLAIN_SECONDS = 10.0
"""Least time between two lines that no connection can be accepted."""

END = b"\r\n\r\n"
_REQUEST = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00\r\n]*?)[ \t]*")

Answer = tuple[int, Mapping[str, object]]
"""A status and a JSON object."""


class Health:
    """Answers from what the process knows; never asks the database or a destination."""

    def __init__(self, address: tuple[str, int], ready: Callable[[], tuple[bool, Mapping[str, object]]]) -> None:
        self._address = address
        self._ready = ready
        self._connections: dict[_Connection, None] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Listen; returns host and port. Raises OSError when the address cannot be had."""
        host, port = self._address
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self._connections, self._answer), host, port, backlog=ACCEPTED_AT_ONCE
        )
        for listening in self._server.sockets:
            # The backlog of asyncio is both the kernel's queue and how many are accepted in one turn.
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(QUEUE_CONNECTIONS)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    async def stop(self) -> None:
        """Listen no longer, and end every connection."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()

    def _answer(self, path: str) -> Answer:
        match path:
            case "/livez":
                return 200, {"alive": True}
            case "/readyz":
                ready, body = self._ready()
                return (200 if ready else 503), {"ready": ready, **body}
            case _:
                return 404, {"error": "there are /livez and /readyz"}


class _Connection(asyncio.Protocol):
    """One connection: a head comes, an answer goes."""

    def __init__(self, connections: dict[_Connection, None], answer: Callable[[str], Answer]) -> None:
        self._connections = connections
        self._answer = answer
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head = bytearray()
        self._refused = self._answered = False

    # -- called by the event loop -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take part in the bound, at the cost of another connection where it is reached."""
        self._transport = cast("asyncio.Transport", transport)
        if len(self._connections) >= MOST_CONNECTIONS:
            oldest = next((each for each in self._connections if not each._answered), next(iter(self._connections)))
            oldest.abort()
        self._connections[self] = None
        self._end_after(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take part no more."""
        del exc
        self._connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer once the head is whole; throw away what comes behind it."""
        if self._answered or self._refused:
            return
        searched = max(0, len(self._head) - len(END))
        self._head += data[: HEAD_BYTES + 1]
        end = self._head.find(END, searched)
        if end < 0 and len(self._head) <= HEAD_BYTES:
            return
        if not 0 <= end <= HEAD_BYTES - len(END):
            self._refuse(431)
            return
        head, self._head = bytes(self._head[:end]), bytearray()
        self._respond(head)

    # -- what is answered -------------------------------------------------------------------------------------

    def _respond(self, head: bytes) -> None:
        line, *headers = head.split(b"\r\n")
        request = _REQUEST.fullmatch(line)
        fields = [_HEADER.fullmatch(header) for header in headers]
        if request is None or not all(fields):
            self._refuse(400)
        elif request[1] not in {b"GET", b"HEAD"}:
            self._refuse(405)
        elif any(_announces_body(field[1], field[2]) for field in fields if field):
            self._refuse(413)
        else:
            path = request[2].decode("ascii").partition("?")[0]
            self._send(*self._answer(path), with_body=request[1] == b"GET")
            self._answered = True
            if self._transport is not None:
                self._transport.close()
            self._end_after(HEAD_SECONDS)

    def _refuse(self, status: int) -> None:
        """Say what is wrong, and read on for a moment: closed at once, the client might see a reset instead."""
        self._refused = True
        self._head.clear()
        self._send(status, {"error": HTTPStatus(status).phrase}, with_body=True)
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        self._end_after(REFUSED_SECONDS)

    def _send(self, status: int, content: Mapping[str, object], *, with_body: bool) -> None:
        body = json.dumps(content).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
        )
        if self._transport is not None:
            self._transport.write(head.encode("ascii") + (body if with_body else b""))

    # -- its end ----------------------------------------------------------------------------------------------

    def _end_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        """End the connection now, whatever is under way."""
        self._connections.pop(self, None)
        if self._transport is not None:
            self._transport.abort()


def _announces_body(name: bytes, value: bytes) -> bool:
    return name.lower() == b"transfer-encoding" or (name.lower() == b"content-length" and value != b"0")


class AcceptErrors:
    """Handle the event loop's errors: a line with a count when no connection can be accepted, not a traceback each.

    asyncio reports each refused call, many in every turn, for as long as the process has no file descriptor left.
    """

    MESSAGE = "socket.accept() out of system resource"

    def __init__(self, log: BoundLogger) -> None:
        self._log = log
        self._count = 0
        self._said_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report ``context``, as ``loop.set_exception_handler`` promises."""
        if context.get("message") != self.MESSAGE:
            loop.default_exception_handler(context)
            return
        self._count += 1
        if time.monotonic() - self._said_at >= COMPLAIN_SECONDS:
            error = context.get("exception")
            reason = (error.strerror if isinstance(error, OSError) else None) or "out of a resource of the system"
            self._log.warning("no connection can be accepted by the listener", reason=reason, times=self._count)
            self._count, self._said_at = 0, time.monotonic()
