"""The listener: its answers, its refusals, and its bounds, which no client can exceed."""

from __future__ import annotations

import errno
import json
import resource
import socket
import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.service import health
from outbox_relay.service.health import CONNECTIONS_MAX, HEAD_BYTES, METRICS_AT_ONCE, Health, Metrics
from tests.support.logs import RecordedLog
from tests.support.wait import until

LIVEZ = b"GET /livez HTTP/1.1\r\n\r\n"
HALF = b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: "
ASK = b"GET /metrics HTTP/1.1\r\nAccept: a/b\r\naccept: c/d\r\n\r\n"


@contextmanager
def listening(
    ready: bool = True,
    metrics: Metrics | None = None,
    log: RecordedLog | None = None,
    *,
    host: str = "127.0.0.1",
    dead: str | None = None,
) -> Generator[int]:
    """Yield the port of a listener."""
    listener = Health((host, 0), lambda: dead, lambda: (ready, {"sinks": {}}), metrics, log or RecordedLog())
    _, port = listener.start()
    thread = threading.Thread(target=listener.run, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        listener.stop()
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


def sent(port: int, request: bytes, host: str = "127.0.0.1") -> bytes:
    """Return all that is answered to ``request``."""
    return received(connected(port, request, host))


def ended(client: socket.socket) -> bool:
    """Wait until the listener ends a connection without a word."""
    try:
        return received(client) == b""
    except ConnectionResetError:
        return True


def open_files() -> int:
    """Return the number of open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def status(answer: bytes) -> int:
    """Return the status of an answer."""
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_address_is_of_both_families(host: str) -> None:
    with listening(host="::") as port:
        assert status(sent(port, LIVEZ, host)) == 200


def test_every_address_without_ipv6_is_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    test_every_address_is_of_both_families("127.0.0.1")


@pytest.mark.parametrize(
    ("request_line", "ready", "expected"),
    [
        ("GET /livez", False, 200),
        ("GET /readyz", True, 200),
        ("GET /readyz?verbose=1", False, 503),
        ("HEAD /readyz", True, 200),
        ("GET /metricz", True, 404),
        ("POST /livez", True, 405),
        ("get /livez", True, 400),
        ("GET livez", True, 400),
        ("GET /live\x00z", True, 400),
    ],
)
def test_answers(request_line: str, ready: bool, expected: int) -> None:
    with listening(ready) as port:
        answer = sent(port, f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert status(answer) == expected
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"server:" not in head.lower()
    assert b"connection: close" in head
    assert (body == b"") == request_line.startswith("HEAD")
    if body:
        assert f"content-length: {len(body)}".encode() in head
        json.loads(body)


def test_a_process_that_must_be_restarted_does_not_live() -> None:
    with listening(dead="the main thread is stuck") as port:
        answer = sent(port, LIVEZ)
    assert (status(answer), b"the main thread is stuck" in answer) == (503, True)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (b"Content-Length: 1000000000\r\n\r\n" + b"x" * 100_000, 413),
        (b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 413),
        (b"content-length: 0\r\n\r\n", 200),
        (b"x: " + b"a" * HEAD_BYTES + b"\r\n\r\n", 431),
        (b"x: " + b"a" * 10 * HEAD_BYTES, 431),
        (b"no colon\r\n\r\n", 400),
        (b"x : blank\r\n\r\n", 400),
        (b"x: nul\x00\r\n\r\n", 400),
        (b"x: line\nfeed\r\n\r\n", 400),
        (b"x: y\r\n\r\nGET /readyz HTTP/1.1\r\n\r\n", 200),
    ],
)
def test_bounds_of_a_request(rest: bytes, expected: int) -> None:
    with listening() as port:
        answer = sent(port, b"GET /livez HTTP/1.1\r\n" + rest)
    assert status(answer) == expected
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_head_may_come_in_pieces() -> None:
    with listening() as port:
        client = connected(port)
        for byte in b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n":
            client.sendall(bytes((byte,)))
        assert status(received(client)) == 200


def test_a_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEAD_SECONDS", 0.05)
    with listening() as port:
        assert ended(connected(port, HALF))


def test_a_connection_more_than_the_bound_closes_the_oldest_without_a_request() -> None:
    with listening() as port:
        first, second, *rest = [connected(port) for _ in range(CONNECTIONS_MAX)]
        first.sendall(HALF)
        assert status(sent(port, LIVEZ)) == 200
        assert ended(first)
        second.sendall(LIVEZ)
        assert status(received(second)) == 200, "one was closed, not all"
        for client in rest:
            client.close()


def test_every_connection_ends_with_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEAD_SECONDS", 3600.0)  # it does not end by itself
    with listening() as port:
        client = connected(port, HALF)
        assert status(sent(port, LIVEZ)) == 200
    assert ended(client)


def test_a_process_without_free_descriptors_accepts_again_and_logs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ACCEPT_PAUSE_SECONDS", 0.02)
    log, limit = RecordedLog(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening(log=log) as port, socket.socket() as client:
        client.settimeout(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() // 2, limit[1]))
        try:
            client.connect(("127.0.0.1", port))
            client.sendall(LIVEZ)
            until(lambda: log.warnings, seconds=10, what="it is logged")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert status(client.recv(1000)) == 200
    assert log.warnings == [("http.accept_failed", {"reason": "Too many open files", "times": 1})]


def test_a_large_answer_arrives_whole() -> None:
    """Goes red when the part that was not sent at once is lost."""
    body = bytes(range(256)) * 80_000
    with listening(metrics=lambda _: ("text/plain", body)) as port:
        _, _, found = sent(port, ASK).partition(b"\r\n\r\n")
    assert found == body


def test_an_error_of_one_connection_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when the listener pauses. The error is made: no network that fails so can be had here."""
    log, accept, failed = RecordedLog(), socket.socket.accept, list[int]()

    def fails_once(listening: socket.socket) -> tuple[socket.socket, Any]:
        if not failed:
            failed.append(errno.EHOSTUNREACH)
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        return accept(listening)

    monkeypatch.setattr(health, "ACCEPT_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr(socket.socket, "accept", fails_once)
    with listening(log=log) as port:
        assert status(sent(port, LIVEZ)) == 200
    assert failed
    assert log.warnings == []


def test_a_client_that_goes_before_it_is_accepted_leaves_nothing_behind() -> None:
    before = open_files()
    with listening() as port:
        for request in (b"", HALF, LIVEZ, b"nonsense\r\n\r\n"):
            for linger in (b"", struct.pack("ii", 1, 0)):  # the second one resets the connection
                client = connected(port, request)
                if linger:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                client.close()
        assert status(sent(port, LIVEZ)) == 200
        until(lambda: open_files() <= before + 2, seconds=10, what="the listener closes them")
    assert open_files() <= before


def test_metrics_are_answered_with_their_own_type_and_get_all_lines_of_accept() -> None:
    with listening(metrics=lambda accept: ("text/plain", ",".join(accept).encode())) as port:
        head, _, body = sent(port, ASK).partition(b"\r\n\r\n")
        only_head = sent(port, ASK.replace(b"GET", b"HEAD"))
    assert (status(head), body) == (200, b"a/b,c/d")
    assert b"content-type: text/plain\r\ncontent-length: 7\r\n" in head
    assert only_head == head + b"\r\n\r\n"


def test_metrics_that_cannot_be_rendered_are_an_error_of_the_request_alone() -> None:
    def fails(_accept: Sequence[str]) -> tuple[str, bytes]:
        raise ValueError("a secret")

    with listening(metrics=fails) as port:
        answer = sent(port, ASK)
        assert status(sent(port, LIVEZ)) == 200
    assert (status(answer), b"secret" in answer) == (500, False)


def test_clients_that_never_read_hold_few_answers_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when each of them keeps an answer in memory: they get a refusal, which fits into the kernel's buffer."""
    rendered: list[object] = []

    def large(accept: Sequence[str]) -> tuple[str, bytes]:
        rendered.append(accept)
        return "text/plain", b"x" * (8 << 20)

    with listening(metrics=large) as port:
        held = [connected(port, ASK) for _ in range(CONNECTIONS_MAX)]
        assert status(sent(port, LIVEZ)) == 200
        assert len(rendered) <= METRICS_AT_ONCE
        for each in held:
            each.close()
        monkeypatch.setattr(health, "HEAD_SECONDS", 0.05)
        until(lambda: status(sent(port, ASK)) == 200, seconds=30, what="metrics are answered again")
