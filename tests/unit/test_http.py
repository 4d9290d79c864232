"""The listener: its answers, its refusals, and its bounds, which no client can exceed."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.registry import Collector

from outbox_relay.service import http
from outbox_relay.service.http import CONNECTIONS_MAX, Listener
from tests.support.logs import RecordedLog
from tests.support.wait import until

LIVEZ = b"GET /livez HTTP/1.1\r\n\r\n"
HALF = b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: "


class Faulty(Collector):
    """A collector that fails."""

    def collect(self) -> Iterator[Metric]:
        raise ValueError("a secret")


@contextmanager
def listening(
    *, ready: bool = True, dead: str | None = None, host: str = "127.0.0.1", log: RecordedLog | None = None
) -> Generator[tuple[int, CollectorRegistry]]:
    """Yield the port of a listener, and its registry, which has one metric."""
    registry = CollectorRegistry()
    Gauge("answer", "The answer.", registry=registry).set(42)
    readiness = SimpleNamespace(dead=lambda: dead, report=lambda: (ready, dict[str, object](sinks=None)))
    listener = Listener((host, 0), cast("Any", readiness), registry, log or RecordedLog())
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield listener.server_address[1], registry
    finally:
        listener.close()
        thread.join(10)
        assert not thread.is_alive()


def connected(port: int, request: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    """Return a connection on which ``request`` was sent."""
    client = socket.create_connection((host, port), timeout=30)
    client.sendall(request)
    return client


def received(client: socket.socket) -> bytes:
    """Return all that is answered until the listener ends the connection."""
    pieces: list[bytes] = []
    with client:
        while piece := client.recv(1 << 20):
            pieces.append(piece)
    return b"".join(pieces)


def sent(port: int, request: bytes, host: str = "127.0.0.1") -> tuple[int, bytes, bytes]:
    """Return status, head and body of the answer to ``request``."""
    head, _, body = received(connected(port, request, host)).partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), head, body


def ended(client: socket.socket) -> bool:
    """Wait until the listener ends a connection without a word."""
    try:
        return received(client) == b""
    except ConnectionResetError:
        return True


def test_answers_and_refusals() -> None:
    with listening(ready=False) as (port, registry):
        for line, expected in (
            ("GET /livez", 200),
            ("GET /readyz?verbose=1", 503),
            ("HEAD /readyz", 503),
            ("GET /metricz", 404),
            ("POST /livez", 501),
            (f"GET /{'x' * 70_000}", 414),
        ):
            status, head, body = sent(port, f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (status, bool(body)) == (expected, not line.startswith("HEAD")), line
            assert b"content-type: application/json" in head.lower()
            if body:
                json.loads(body)
        assert sent(port, LIVEZ[:-2] + b"".join(b"x: y\r\n" for _ in range(101)) + b"\r\n")[0] == 431
        status, head, body = sent(port, b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n")
        assert (status, body.endswith(b"answer 42.0\n# EOF\n")) == (200, True)
        assert b"content-type: application/openmetrics-text; version=1.0.0" in head
        registry.register(Faulty())
        status, _, body = sent(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert (status, body) == (500, b'{"error": 500}')
    with listening(ready=True, dead="the main thread is stuck", host="::") as (port, _):
        assert sent(port, b"GET /readyz HTTP/1.0\r\n\r\n")[0] == 200
        for host in ("127.0.0.1", "::1"):
            status, _, body = sent(port, LIVEZ, host)
            assert (status, json.loads(body)["reason"]) == (503, "the main thread is stuck")


def test_a_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http._Request, "timeout", 0.05)  # pyright: ignore[reportPrivateUsage]
    with listening() as (port, _):
        assert ended(connected(port, HALF))


def test_a_connection_more_than_the_bound_closes_the_oldest() -> None:
    with listening() as (port, _):
        first, second, *rest = [connected(port) for _ in range(CONNECTIONS_MAX)]
        first.sendall(HALF)
        until(lambda: threading.active_count() > CONNECTIONS_MAX, seconds=10, what="all are accepted")
        assert sent(port, LIVEZ)[0] == 200
        assert ended(first)
        second.sendall(LIVEZ)
        assert b"200" in received(second), "one was closed, not all"
        for client in rest:
            client.close()


def test_a_process_without_free_descriptors_accepts_again_and_logs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ACCEPT_PAUSE_SECONDS", 0.02)
    log, limit = RecordedLog(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening(log=log) as (port, _), socket.socket() as client:
        client.settimeout(10)
        files = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, limit[1]))
        try:
            client.connect(("127.0.0.1", port))
            client.sendall(LIVEZ)
            until(lambda: log.warnings, seconds=10, what="it is logged")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert b"200" in client.recv(1000)
    assert log.warnings == [("http.accept_failed", {"reason": "Too many open files"})]
