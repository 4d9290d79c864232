"""The HTTP listener: ``/livez`` fails if the process must be restarted, ``/readyz`` if it does not do its work.

``/metrics`` is for Prometheus.

All resources that a client can occupy are bounded: connections, the size and duration of a request head, the duration
of an answer. A connection carries one request, and a request has no body. No server library bounds all of these, and
three paths need none.

A request that has arrived when its connection is accepted is answered in that turn of the event loop. asyncio needs
four turns to accept a connection and to read from it, and each is long while several sinks drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple, cast

from structlog.stdlib import BoundLogger

CONNECTIONS_MAX = 64
"""Maximum number of connections. One more closes the oldest that has not sent a complete request head."""
HEAD_BYTES = 8192
"""Maximum size of a request head."""
READ_BYTES = 1 << 16
"""Maximum number of bytes that are read when a connection is accepted. Unread ones may cost the client the answer."""
HEAD_SECONDS = 5.0
"""Time limit for receiving a request head, and for sending an answer."""
REFUSED_SECONDS = 1.0
"""Time for which the rest of a refused request is read and dropped, so that the client reads the answer."""
ACCEPTED_AT_ONCE = 16
"""Maximum number of connections accepted in one turn of the event loop.

Those of three turns fit into ``CONNECTIONS_MAX``, so no connection is closed before it had a turn to be read.
"""
ACCEPT_PAUSE_SECONDS = 1.0
"""Time after which connections are accepted again, once the process has had no resources for one."""
NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of ``accept`` that hold for the next connection too. Linux also reports errors of the connection itself."""
ANY = "::"
"""The host for every address, of IPv6 and IPv4."""
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


def _encoded(answer: Answer, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: {answer.content_type}\r\n"
        f"content-length: {len(answer.body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + (answer.body if with_body else b"")


NOT_RENDERED = _json(500, {"error": "the metrics could not be rendered"})
"""The answer to a request for metrics after an error."""


def listen_anywhere(port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at every address of this machine, of IPv6 and IPv4. Raises OSError."""
    if not socket.has_dualstack_ipv6():  # a kernel without IPv6
        return socket.create_server(("", port), backlog=backlog)
    return socket.create_server((ANY, port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)


class Health:
    """Listens at ``address``. ``ready`` returns the answer of ``/readyz``, and ``metrics`` that of ``/metrics``.

    Every answer but that of ``/metrics`` is given at once, and that one too if it is returned at once.
    """

    def __init__(
        self,
        address: tuple[str, int],
        ready: Callable[[], tuple[bool, Mapping[str, object]]],
        metrics: Metrics | None,
        log: BoundLogger,
    ) -> None:
        self._address = address
        self._ready = ready
        self._metrics = metrics
        self._connections: dict[_Connection, None] = {}
        self._failures = AcceptFailures(log)
        self._listening: list[socket.socket] = []

    async def start(self) -> tuple[str, int]:
        """Listen, and return host and port. Raises OSError if the address cannot be used."""
        host, port = self._address
        if host == ANY:
            self._listening = [listen_anywhere(port, QUEUE_CONNECTIONS)]
        else:
            # asyncio only resolves the name and binds the sockets, those of IPv6 without IPv4.
            binding = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
            self._listening = [socket.socket(fileno=os.dup(bound.fileno())) for bound in binding.sockets]
            binding.close()
        for listening in self._listening:
            listening.setblocking(False)
            listening.listen(QUEUE_CONNECTIONS)
            self._resume(listening)
        bound = self._listening[0].getsockname()
        return bound[0], bound[1]

    async def stop(self) -> None:
        """Stop listening, and close every connection."""
        listening, self._listening = self._listening, []
        for each in listening:
            asyncio.get_running_loop().remove_reader(each)
            each.close()
        adopting = [connection.adopting for connection in self._connections if connection.adopting]
        for connection in list(self._connections):
            connection.abort()
        if adopting:
            await asyncio.wait(adopting)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept the connections that wait. Pause if the process has no resources for another one."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in NO_RESOURCES:
                    continue  # an error of that connection alone
                self._failures.add(error)
                asyncio.get_running_loop().remove_reader(listening)
                asyncio.get_running_loop().call_later(ACCEPT_PAUSE_SECONDS, self._resume, listening)
                return
            accepted.setblocking(False)
            _Connection(accepted, self._connections, self._answer, self._answer_metrics).begin()

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
    """One connection with one request. ``connections`` holds all open ones, oldest first.

    It belongs to asyncio only if it cannot be answered in the turn in which it was accepted.
    """

    def __init__(
        self,
        accepted: socket.socket,
        connections: dict[_Connection, None],
        answer: Callable[[str], Answer],
        answer_metrics: Callable[[str, Sequence[str]], Content | Awaitable[Content] | Answer | None],
    ) -> None:
        self._socket = accepted
        self._connections = connections
        self._answer = answer
        self._answer_metrics = answer_metrics
        self.adopting: asyncio.Task[None] | None = None
        """Hands the connection over to asyncio; None before it is needed."""
        self._task: asyncio.Task[None] | None = None
        self.asked = False
        """True once ``/metrics`` was requested, until the connection ends."""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head = bytearray()
        self._unsent = b""
        self._refused = self._answered = False

    def begin(self) -> None:
        """Answer a request that has arrived, or wait for it. Close another connection if there are too many."""
        if len(self._connections) >= CONNECTIONS_MAX:
            oldest = next((each for each in self._connections if not each._has_request), next(iter(self._connections)))
            oldest.abort()
        self._connections[self] = None
        self._end_after(HEAD_SECONDS)
        try:
            received = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            is_over = False
        except OSError:  # the client has gone
            is_over = True
        else:
            self.data_received(received)
            is_over = not received or (self._answered and not self._unsent)
        if is_over:
            self.abort()
        else:
            self.adopting = asyncio.get_running_loop().create_task(self._adopt())

    async def _adopt(self) -> None:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, self._socket)

    # -- called by the event loop -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what the first turn could not send."""
        self._transport = cast("asyncio.Transport", transport)
        if self._unsent:
            self._transport.write(self._unsent)
            self._unsent = b""
        if self._answered:
            self._transport.close()
        elif self._refused:
            self._end_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        del exc
        self._forget()

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
        self._send(_encoded(answer, with_body=with_body))
        self._answered = True
        if self._transport is not None:
            self._transport.close()
        self._end_after(HEAD_SECONDS)

    def _refuse(self, status: int) -> None:
        """Answer with an error and keep reading for a moment. A client may see a reset if closed at once."""
        self._refused = True
        self._head.clear()
        self._send(_encoded(_json(status, {"error": HTTPStatus(status).phrase}), with_body=True))
        self._end_writing()
        self._end_after(REFUSED_SECONDS)

    def _end_writing(self) -> None:
        if self._transport is not None and self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has gone
                self._transport.write_eof()

    def _send(self, data: bytes) -> None:
        """Send ``data``, or what fits before asyncio has the connection."""
        if self._transport is not None:
            self._transport.write(data)
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # the client has gone
            sent = len(data)
        self._unsent = data[sent:]

    # -- the end ----------------------------------------------------------------------------------------------

    def _end_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def abort(self) -> None:
        """Close the connection at once, and drop unsent data."""
        self._forget()
        if self._transport is not None:
            self._transport.abort()
        elif self.adopting is None:
            self._socket.close()
        else:
            self.adopting.add_done_callback(lambda _: self._socket.close())
            self.adopting.cancel()

    def _forget(self) -> None:
        self._connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


def _announces_body(name: bytes, value: bytes) -> bool:
    return name.lower() == b"transfer-encoding" or (name.lower() == b"content-length" and value != b"0")


class AcceptFailures:
    """Failures to accept connections, logged as one line with a count at most every ``LOG_INTERVAL_SECONDS``."""

    def __init__(self, log: BoundLogger) -> None:
        self._log = log
        self._count = 0
        self._logged_at = float("-inf")

    def add(self, error: OSError) -> None:
        """Count a failure."""
        self._count += 1
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._log.warning("http.accept_failed", reason=error.strerror, times=self._count)
            self._count, self._logged_at = 0, time.monotonic()
