"""The HTTP listener: ``/livez`` fails if the process must be restarted, ``/readyz`` if it does not do its work.

``/metrics`` is for Prometheus.

One thread serves all connections. All resources that a client can occupy are bounded: connections, the size and
duration of a request head, the duration of an answer. A connection carries one request, and a request has no body. No
server library bounds all of these, and three paths need none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from structlog.stdlib import BoundLogger

CONNECTIONS_MAX = 64
"""Maximum number of connections. One more closes the oldest that has not sent a complete request head."""
HEAD_BYTES = 8192
"""Maximum size of a request head."""
READ_BYTES = 1 << 16
HEAD_SECONDS = 5.0
"""Time limit for receiving a request head, and for sending an answer."""
END_SECONDS = 1.0
"""Time for which what follows an answered request is read and dropped, so that the client reads the answer."""
ACCEPTED_AT_ONCE = 16
"""Maximum number of connections accepted in one turn: each has several turns to be read before it may be closed."""
ACCEPT_PAUSE_SECONDS = 1.0
"""Time after which connections are accepted again, once the process has had no resources for one."""
NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of ``accept`` that hold for the next connection too. Linux also reports errors of the connection itself."""
TURN_SECONDS = 0.25
"""Maximum wait for a connection."""
ANY = "::"
"""The host for every address, of IPv6 and IPv4."""
QUEUE_CONNECTIONS = 1024
"""Size of the kernel's queue of connections. A client that finds it full tries again after a second."""
LOG_INTERVAL_SECONDS = 10.0
"""Least time between two log lines about connections that cannot be accepted."""
METRICS_AT_ONCE = 4
"""Maximum number of connections that have not read their answer of ``/metrics``."""

END = b"\r\n\r\n"
_REQUEST = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00\r\n]*?)[ \t]*")


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    content_type: str
    body: bytes


Metrics = Callable[[Sequence[str]], tuple[str, bytes]]
"""Returns the content type and the body of ``/metrics`` for the lines of the header ``Accept``."""


def _json(status: int, content: Mapping[str, object]) -> Answer:
    return Answer(status, "application/json", json.dumps(content).encode())


def _refusal(status: int) -> Answer:
    return _json(status, {"error": HTTPStatus(status).phrase})


def _encoded(answer: Answer, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: {answer.content_type}\r\n"
        f"content-length: {len(answer.body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + (answer.body if with_body else b"")


def listen_anywhere(port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at every address of this machine, of IPv6 and IPv4. Raises OSError."""
    if not socket.has_dualstack_ipv6():  # a kernel without IPv6
        return socket.create_server(("", port), backlog=backlog)
    return socket.create_server((ANY, port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)


class _Connection:
    """One connection with one request, which ends at ``deadline``."""

    __slots__ = ("answered", "deadline", "head", "metrics", "socket", "unsent")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.deadline = time.monotonic() + HEAD_SECONDS
        self.head = bytearray()
        self.unsent = memoryview(b"")
        self.answered = self.metrics = False


class Health:
    """Listens at ``address``.

    ``dead`` returns why the process must be restarted, or None. ``ready`` returns the answer of ``/readyz``, and
    ``metrics`` that of ``/metrics``. All are called in the thread of ``run``.
    """

    def __init__(
        self,
        address: tuple[str, int],
        dead: Callable[[], str | None],
        ready: Callable[[], tuple[bool, Mapping[str, object]]],
        metrics: Metrics | None,
        log: BoundLogger,
    ) -> None:
        self._address = address
        self._dead = dead
        self._ready = ready
        self._metrics = metrics
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._listening: list[socket.socket] = []
        self._connections: dict[_Connection, None] = {}
        """All open connections, oldest first."""
        self._over = threading.Event()
        self._accept_again_at: float | None = None
        self._failures = 0
        self._logged_at = float("-inf")

    def start(self) -> tuple[str, int]:
        """Listen, and return host and port. Raises OSError if the address cannot be used."""
        host, port = self._address
        if host == ANY:
            self._listening = [listen_anywhere(port, QUEUE_CONNECTIONS)]
        else:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in {(family, address[:2]): None for family, *_, address in found}:
                self._listening.append(socket.create_server(address, family=family, backlog=QUEUE_CONNECTIONS))
        for listening in self._listening:
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ)
        bound = self._listening[0].getsockname()
        return bound[0], bound[1]

    def run(self) -> None:
        """Serve connections until ``stop``."""
        try:
            while not self._over.is_set():
                for key, _ in self._selector.select(TURN_SECONDS):
                    if isinstance(key.data, _Connection):
                        self._serve(key.data)
                    elif isinstance(key.fileobj, socket.socket):
                        self._accept(key.fileobj)
                self._end_late(time.monotonic())
        finally:
            for connection in list(self._connections):
                self._close(connection)
            for listening in self._listening:
                listening.close()
            self._selector.close()

    def stop(self) -> None:
        """End ``run``, from any thread, which closes every connection."""
        self._over.set()

    # -- connections --------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        """Accept the connections that wait. Pause if the process has no resources for another one."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_RESOURCES:
                    self._pause(error)
                    return
                continue  # an error of that connection alone
            accepted.setblocking(False)
            if len(self._connections) >= CONNECTIONS_MAX:
                waiting = (each for each in self._connections if not each.answered)
                self._close(next(waiting, next(iter(self._connections))))
            connection = _Connection(accepted)
            self._connections[connection] = None
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._serve(connection)

    def _pause(self, error: OSError) -> None:
        """Accept no connection for a while, and log failures at most every ``LOG_INTERVAL_SECONDS``."""
        now = time.monotonic()
        for listening in self._listening:
            self._selector.unregister(listening)
        self._accept_again_at = now + ACCEPT_PAUSE_SECONDS
        self._failures += 1
        if now - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._log.warning("http.accept_failed", reason=error.strerror, times=self._failures)
            self._failures, self._logged_at = 0, now

    def _end_late(self, now: float) -> None:
        for connection in [each for each in self._connections if each.deadline <= now]:
            self._close(connection)
        if self._accept_again_at is not None and self._accept_again_at <= now:
            self._accept_again_at = None
            for listening in self._listening:
                self._selector.register(listening, selectors.EVENT_READ)

    def _serve(self, connection: _Connection) -> None:
        if connection not in self._connections:  # closed in this turn
            return
        try:
            if connection.unsent:
                self._write(connection)
            else:
                self._read(connection)
        except BlockingIOError:
            return
        except OSError:  # the client has gone
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    # -- a request ----------------------------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        """Answer once the head is complete, and drop further data."""
        data = connection.socket.recv(READ_BYTES)
        if not data:
            self._close(connection)
        elif not connection.answered:
            connection.head += data[: HEAD_BYTES + 1]
            end = connection.head.find(END)
            if 0 <= end <= HEAD_BYTES - len(END):
                self._respond(connection, bytes(connection.head[:end]))
            elif end >= 0 or len(connection.head) > HEAD_BYTES:
                self._send(connection, _refusal(431))

    def _respond(self, connection: _Connection, head: bytes) -> None:
        line, *headers = head.split(b"\r\n")
        request = _REQUEST.fullmatch(line)
        fields = [field for header in headers if (field := _HEADER.fullmatch(header))]
        if request is None or len(fields) < len(headers):
            self._send(connection, _refusal(400))
        elif request[1] not in {b"GET", b"HEAD"}:
            self._send(connection, _refusal(405))
        elif any(_announces_body(field[1], field[2]) for field in fields):
            self._send(connection, _refusal(413))
        else:
            path = request[2].decode("ascii").partition("?")[0]
            if path == "/metrics" and self._metrics is not None:
                accept = [field[2].decode("latin-1") for field in fields if field[1].lower() == b"accept"]
                answer, connection.metrics = self._rendered(self._metrics, accept), True
            else:
                answer = self._answer(path)
            self._send(connection, answer, with_body=request[1] == b"GET")

    def _answer(self, path: str) -> Answer:
        match path:
            case "/livez":
                dead = self._dead()
                return _json(200, {"alive": True}) if dead is None else _json(503, {"alive": False, "reason": dead})
            case "/readyz":
                ready, body = self._ready()
                return _json(200 if ready else 503, {"ready": ready, **body})
            case _:
                return _json(404, {"error": "there are /livez, /readyz and /metrics"})

    def _rendered(self, metrics: Metrics, accept: Sequence[str]) -> Answer:
        if sum(each.metrics and bool(each.unsent) for each in self._connections) >= METRICS_AT_ONCE:
            return _json(503, {"error": "too many requests for /metrics at once"})
        try:
            return Answer(200, *metrics(accept))
        except Exception:  # an error of a page that is only read ends nothing else
            return _json(500, {"error": "the metrics could not be rendered"})

    def _send(self, connection: _Connection, answer: Answer, *, with_body: bool = True) -> None:
        connection.head.clear()
        connection.answered = True
        connection.unsent = memoryview(_encoded(answer, with_body=with_body))
        connection.deadline = time.monotonic() + HEAD_SECONDS
        self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        """Send what fits. Once all is sent, read on for a moment: a client may see a reset if closed at once."""
        connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        if not connection.unsent:
            connection.deadline = time.monotonic() + END_SECONDS
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
            with contextlib.suppress(OSError):  # the client has gone
                connection.socket.shutdown(socket.SHUT_WR)


def _announces_body(name: bytes, value: bytes) -> bool:
    return name.lower() == b"transfer-encoding" or (name.lower() == b"content-length" and value != b"0")
