"""The HTTP listener: ``/livez`` fails if the process must be restarted, ``/readyz`` if it does not do its work.

``/metrics`` is for Prometheus.

All resources that a client can occupy are bounded: connections, the size and duration of a request head, the duration
of an answer. A connection carries one request, and a request has no body. No server library bounds all of these, and
three paths need none.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, cast

from structlog.stdlib import BoundLogger

CONNECTIONS_MAX = 64
"""Maximum number of connections. One more closes the oldest that has not sent a complete request head."""
HEAD_BYTES = 8192
"""Maximum size of a request head."""
HEAD_SECONDS = 5.0
"""Time limit for receiving a request head, and for sending an answer."""
REFUSED_SECONDS = 1.0
"""Time for which the rest of a refused request is read and dropped, so that the client reads the answer."""
ACCEPTED_AT_ONCE = 16
"""Maximum number of connections accepted in one turn of the event loop.

Those of two turns fit into ``CONNECTIONS_MAX``, so no connection is closed before it had a turn to be read.
"""
QUEUE_CONNECTIONS = 1024
"""Size of the kernel's queue of connections. A client that finds it full tries again after a second."""
LOG_INTERVAL_SECONDS = 10.0
"""Least time between two log lines about connections that cannot be accepted."""

END = b"\r\n\r\n"
_REQUEST = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00\r\n]*?)[ \t]*")

METRICS_AT_ONCE = 4
"""Maximum number of connections that wait for an answer of ``/metrics``, or have not read it."""


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    content_type: str
    body: bytes


Content = tuple[str, bytes]
"""Content type and body."""

Metrics = Callable[[Sequence[str]], Content | Awaitable[Content]]
"""Returns the content of ``/metrics`` for the lines of the header ``Accept``, at once or later."""


def _json(status: int, content: Mapping[str, object]) -> Answer:
    return Answer(status, "application/json", json.dumps(content).encode())


NOT_RENDERED = _json(500, {"error": "the metrics could not be rendered"})
"""The answer to a request for metrics after an error."""


class Health:
    """Listens at ``address``. ``ready`` returns the answer of ``/readyz``, and ``metrics`` that of ``/metrics``.

    Every answer but that of ``/metrics`` is given at once, and that one too if it is returned at once.
    """

    def __init__(
        self,
        address: tuple[str, int],
        ready: Callable[[], tuple[bool, Mapping[str, object]]],
        metrics: Metrics | None = None,
    ) -> None:
        self._address = address
        self._ready = ready
        self._metrics = metrics
        self._connections: dict[_Connection, None] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Listen, and return host and port. Raises OSError if the address cannot be used."""
        host, port = self._address
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self._connections, self._answer, self._answer_metrics),
            host,
            port,
            backlog=ACCEPTED_AT_ONCE,
        )
        for listening in self._server.sockets:
            # In asyncio the backlog is the size of the kernel's queue and also the number accepted in one turn.
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(QUEUE_CONNECTIONS)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    async def stop(self) -> None:
        """Stop listening, and close every connection."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()

    def _answer(self, path: str) -> Answer:
        match path:
            case "/livez":
                return _json(200, {"alive": True})
            case "/readyz":
                ready, body = self._ready()
                return _json(200 if ready else 503, {"ready": ready, **body})
            case _:
                return _json(404, {"error": "there are /livez, /readyz and /metrics"})

    def _answer_metrics(self, path: str, accept: Sequence[str]) -> Content | Awaitable[Content] | Answer | None:
        """Return the content of ``/metrics``, or a refusal; None for another path."""
        if path != "/metrics" or self._metrics is None:
            return None
        if sum(connection.asked for connection in self._connections) >= METRICS_AT_ONCE:
            return _json(503, {"error": "too many requests for /metrics at once"})
        try:
            return self._metrics(accept)
        except Exception:  # an error of a page that is only read ends nothing else
            return NOT_RENDERED


class _Connection(asyncio.Protocol):
    """One connection with one request. ``connections`` holds all open ones, oldest first."""

    def __init__(
        self,
        connections: dict[_Connection, None],
        answer: Callable[[str], Answer],
        answer_metrics: Callable[[str, Sequence[str]], Content | Awaitable[Content] | Answer | None],
    ) -> None:
        self._connections = connections
        self._answer = answer
        self._answer_metrics = answer_metrics
        self._task: asyncio.Task[None] | None = None
        self.asked = False
        """True once ``/metrics`` was requested, until the connection ends."""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head = bytearray()
        self._refused = self._answered = False

    # -- called by the event loop -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and close another one if there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        if len(self._connections) >= CONNECTIONS_MAX:
            oldest = next((each for each in self._connections if not each._has_request), next(iter(self._connections)))
            oldest.abort()
        self._connections[self] = None
        self._end_after(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        del exc
        self._connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    @property
    def _has_request(self) -> bool:
        return self._answered or self.asked

    def data_received(self, data: bytes) -> None:
        """Answer when the head is complete, and drop further data."""
        if self._has_request or self._refused:
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

    # -- the answer -------------------------------------------------------------------------------------------

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
            accept = [field[2].decode("latin-1") for field in fields if field and field[1].lower() == b"accept"]
            found, with_body = self._answer_metrics(path, accept), request[1] == b"GET"
            if found is None or isinstance(found, Answer):
                self._finish(found or self._answer(path), with_body=with_body)
                return
            self.asked = True
            if isinstance(found, tuple):
                self._finish(Answer(200, *found), with_body=with_body)
            else:
                self._end_after(HEAD_SECONDS)
                self._task = asyncio.get_running_loop().create_task(self._respond_later(found, with_body=with_body))

    async def _respond_later(self, found: Awaitable[Content], *, with_body: bool) -> None:
        """Answer when ``found`` has ended, with a status of 500 if it fails."""
        try:
            answer = Answer(200, *await found)
        except Exception:  # an error of a page that is only read ends nothing else
            answer = NOT_RENDERED
        self._finish(answer, with_body=with_body)

    def _finish(self, answer: Answer, *, with_body: bool) -> None:
        """Send the answer, and close the connection when it is sent."""
        self._send(answer, with_body=with_body)
        self._answered = True
        if self._transport is not None:
            self._transport.close()
        self._end_after(HEAD_SECONDS)

    def _refuse(self, status: int) -> None:
        """Answer with an error and keep reading for a moment. A client may see a reset if closed at once."""
        self._refused = True
        self._head.clear()
        self._send(_json(status, {"error": HTTPStatus(status).phrase}), with_body=True)
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        self._end_after(REFUSED_SECONDS)

    def _send(self, answer: Answer, *, with_body: bool) -> None:
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: {answer.content_type}\r\n"
            f"content-length: {len(answer.body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
        )
        if self._transport is not None:
            self._transport.write(head.encode("ascii"))
            if with_body:
                self._transport.write(answer.body)

    # -- the end ----------------------------------------------------------------------------------------------

    def _end_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        """Close the connection at once, and drop unsent data."""
        self._connections.pop(self, None)
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()


def _announces_body(name: bytes, value: bytes) -> bool:
    return name.lower() == b"transfer-encoding" or (name.lower() == b"content-length" and value != b"0")


class AcceptErrors:
    """An exception handler of an event loop that logs failures to accept connections as one line with a count.

    While the process has no free file descriptor, asyncio reports many failures in every turn of the event loop.
    """

    MESSAGE = "socket.accept() out of system resource"

    def __init__(self, log: BoundLogger) -> None:
        self._log = log
        self._count = 0
        self._logged_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log the failure in ``context``. Pass any other to the default handler."""
        if context.get("message") != self.MESSAGE:
            loop.default_exception_handler(context)
            return
        self._count += 1
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_SECONDS:
            error = context.get("exception")
            reason = (error.strerror if isinstance(error, OSError) else None) or "out of a resource of the system"
            self._log.warning("http.accept_failed", reason=reason, times=self._count)
            self._count, self._logged_at = 0, time.monotonic()
