"""The HTTP listener: ``/livez`` fails if the process must be restarted, ``/readyz`` if it does not do its work.

``/metrics`` is for Prometheus. All answers are from memory: the database and the destinations are not asked.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from structlog.stdlib import BoundLogger

from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.domain.times import lease_clock
from outbox_relay.relay.keeper import Keeper
from outbox_relay.service.metrics import exposition
from outbox_relay.service.sinks import ServedSink

SILENT_SECONDS = 10.0
"""Time without an answer of the database after which a relay is not ready."""
STUCK_SECONDS, STUCK_LEASES = 60.0, 2
"""Time without a turn of the main thread, of the one that keeps the leases, or of the loop of a sink, after which the
process must end, plus this many times that of a lease. Every turn has a time limit, also if the database does not
answer. A stop has its own."""

CONNECTIONS_MAX = 32
"""Maximum number of connections. One more closes the oldest, so that idle clients keep no probe out."""
REQUEST_SECONDS = 5.0
"""Time limit of each wait for a client."""
ACCEPT_PAUSE_SECONDS = 1.0
"""Time after which connections are accepted again, once the process has had no resources for one."""
NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
ANY = "::"
"""The host for every address, of IPv6 and IPv4."""


class Readiness:
    """Reports whether the process lives, and whether it does its work."""

    def __init__(
        self,
        sinks: Mapping[str, ServedSink],
        keeper: Keeper,
        last_reload_successful: Callable[[], bool],
        stopping: threading.Event,
    ) -> None:
        self._sinks = sinks
        self._keeper = keeper
        self._last_reload_successful = last_reload_successful
        self._stopping = stopping
        self.turned_at = time.monotonic()
        """The ``time.monotonic()`` value of the last turn of the main thread."""

    def dead(self) -> str | None:
        """Return why the process must be restarted, or None."""
        if self._stopping.is_set():
            return None
        limit = STUCK_SECONDS + STUCK_LEASES * self._keeper.lease_seconds
        since = time.monotonic() - limit
        if self.turned_at < since:
            return "the main thread is stuck"
        if self._keeper.turned_at < since:
            return "the thread that keeps the leases is stuck"
        since = lease_clock() - limit
        stuck = [n for n, each in self._sinks.items() if each.leases.turned_at + each.sink.timeout_seconds < since]
        return f"the loop of sink {stuck[0]} is stuck" if stuck else None

    def report(self) -> tuple[bool, Mapping[str, object]]:
        """Return True if the process does its work, and the details for people."""
        silent = time.monotonic() - self._keeper.answered_at
        sinks = {name: _state(sink) for name, sink in self._sinks.items()}
        serving = bool(sinks) and not any(sink["fault"] for sink in sinks.values())
        return serving and silent < SILENT_SECONDS and not self._stopping.is_set(), {
            "database_heard_seconds_ago": round(silent, 1) if sinks else None,
            "config_last_reload_successful": self._last_reload_successful(),
            "sinks": sinks,
        }


def _state(sink: ServedSink) -> dict[str, object]:
    return {
        "shards": len(sink.leases.held),
        "in_hand": sink.loop.in_hand,
        "in_flight_limit": sink.loop.in_flight_limit,
        "circuit": sink.loop.circuit,
        "fault": sink.loop.fault,
        "trouble": sink.sink.trouble,
        "restarts": dict(sink.restarts),
        "attempts_not_recorded": sink.loop.recorder.dropped,
    }


class Listener(ThreadingHTTPServer):
    """Listens at ``address`` once it is made; ``serve_forever`` answers. Raises OSError or UnicodeError.

    A connection carries one request, and has a thread.
    """

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], readiness: Readiness, registry: CollectorRegistry, log: BoundLogger
    ) -> None:
        super().__init__(address, partial(_Request, readiness, registry), bind_and_activate=False)
        self.socket.close()
        self.socket = listen(*address)
        self.server_address = self.socket.getsockname()
        self._log = RateLimitedLog(log)
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}
        """The sockets of all connections, the oldest first."""

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Pause if the process has no resources for one."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in NO_RESOURCES:
                self._log.warning("http.accept_failed", reason=error.strerror)
                time.sleep(ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, and end the oldest one if there are too many."""
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _end(oldest)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a client that has gone, and a thread that could not be started."""

    def close(self) -> None:
        """End ``serve_forever``, and listen no more."""
        self.shutdown()
        self.server_close()


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)  # its thread closes it
    except OSError:
        return


class _Request(BaseHTTPRequestHandler):
    """One request."""

    timeout = REQUEST_SECONDS
    server_version, sys_version = "outbox-relay", ""
    error_content_type = "application/json"
    error_message_format = '{"error": %(code)d}'

    def __init__(self, readiness: Readiness, registry: CollectorRegistry, *arguments: Any) -> None:
        self._readiness = readiness
        self._registry = registry
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer a GET, or a HEAD without the body."""
        match self.path.partition("?")[0]:
            case "/livez":
                dead = self._readiness.dead()
                self._answer(503 if dead else 200, {"alive": not dead, **({"reason": dead} if dead else {})})
            case "/readyz":
                ready, details = self._readiness.report()
                self._answer(200 if ready else 503, {"ready": ready, **details})
            case "/metrics":
                try:
                    answer = exposition(self._registry, ",".join(self.headers.get_all("accept", [])))
                except Exception:  # an error of a page that is only read ends nothing else
                    self.send_error(500)
                else:
                    self._send(200, *answer)
            case _:
                self._answer(404, {"error": "there are /livez, /readyz and /metrics"})

    def do_HEAD(self) -> None:
        """Answer a HEAD."""
        self.do_GET()

    def _answer(self, status: int, content: Mapping[str, object]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.send_header("cache-control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the library
        """Log no request."""


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Return a socket that listens at an address, with an IPv4 one preferred for a name. Raises OSError.

    At ``ANY`` it listens at every address of this machine, of IPv6 and IPv4.
    """
    if host == ANY and socket.has_dualstack_ipv6():
        return socket.create_server((ANY, port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    if host == ANY:  # a kernel without IPv6
        return socket.create_server(("", port), backlog=backlog)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return socket.create_server(address[:2], family=family, backlog=backlog)
