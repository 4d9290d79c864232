"""The listener: its answers, its refusals, and its bounds, which no client can exceed."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import resource
import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.service import health
from outbox_relay.service.health import CONNECTIONS_MAX, HEAD_BYTES, METRICS_AT_ONCE, AcceptFailures, Health, Metrics
from tests.support.logs import RecordedLog
from tests.support.wait import auntil

HALF = b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: "


@asynccontextmanager
async def listening(
    ready: bool = True, metrics: Metrics | None = None, log: RecordedLog | None = None
) -> AsyncGenerator[int]:
    """Yield a listener on a free port, and the port."""
    listener = Health(("127.0.0.1", 0), lambda: (ready, {"sinks": {}}), metrics, log or RecordedLog())
    _, port = await listener.start()
    try:
        yield port
    finally:
        await listener.stop()


async def sent(port: int, request: bytes, host: str = "127.0.0.1") -> bytes:
    """Everything that is answered to `request` until the listener ends the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_every_address_is_of_both_families(host: str) -> None:
    listener = Health(("::", 0), lambda: (True, {}), None, RecordedLog())
    _, port = await listener.start()
    try:
        assert (await sent(port, b"GET /livez HTTP/1.1\r\n\r\n", host)).startswith(b"HTTP/1.1 200 ")
    finally:
        await listener.stop()


async def test_every_address_without_ipv6_is_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    await test_every_address_is_of_both_families("127.0.0.1")


async def ended(reader: asyncio.StreamReader) -> bool:
    """Wait until the listener ends a connection without a word."""
    try:
        return await asyncio.wait_for(reader.read(), 30) == b""
    except ConnectionResetError:
        return True


def open_files() -> int:
    """Return the number of open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def status(answer: bytes) -> int:
    """Return the status of an answer."""
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("request_line", "ready", "expected"),
    [
        ("GET /livez", False, 200),
        ("GET /readyz", True, 200),
        ("GET /readyz?verbose=1", False, 503),
        ("HEAD /readyz", True, 200),
        ("GET /metricz", True, 404),
        ("GET /", True, 404),
        ("POST /livez", True, 405),
        ("get /livez", True, 400),
        ("GET livez", True, 400),
        ("GET /live\x00z", True, 400),
        ("GET /live z", True, 400),
    ],
)
async def test_answers(request_line: str, ready: bool, expected: int) -> None:
    async with listening(ready) as port:
        answer = await sent(port, f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert status(answer) == expected
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"server:" not in head.lower()
    assert b"connection: close" in head
    assert (body == b"") == request_line.startswith("HEAD")
    if body:
        assert f"content-length: {len(body)}".encode() in head
        json.loads(body)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (b"content-length: 5\r\n\r\nhello", 413),
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
async def test_bounds_of_a_request(rest: bytes, expected: int) -> None:
    async with listening() as port:
        answer = await sent(port, b"GET /livez HTTP/1.1\r\n" + rest)
    assert status(answer) == expected
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_head_may_come_in_pieces() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n":
            writer.write(bytes((byte,)))
            await writer.drain()
        assert status(await reader.read()) == 200
        writer.close()


async def test_a_library_reads_the_answer() -> None:
    def ask(port: int) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        try:
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    async with listening() as port:
        assert await asyncio.to_thread(ask, port) == (200, {"ready": True, "sinks": {}})


async def test_a_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEAD_SECONDS", 0.05)
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALF)
        assert await ended(reader)
        writer.close()


async def test_a_connection_more_than_the_bound_closes_the_oldest_without_a_request() -> None:
    async with listening() as port:
        first, *others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
        first[1].write(HALF)
        assert status(await sent(port, b"GET /livez HTTP/1.1\r\n\r\n")) == 200
        assert await ended(first[0])
        second, *rest = others
        second[1].write(b"GET /livez HTTP/1.1\r\n\r\n")
        assert status(await second[0].read()) == 200, "one was closed, not all"
        for _, writer in (first, second, *rest):
            writer.close()


async def test_every_connection_ends_with_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEAD_SECONDS", 3600.0)  # it does not end by itself
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALF)
        assert status(await sent(port, b"GET /livez HTTP/1.1\r\n\r\n")) == 200
    assert await ended(reader)
    writer.close()


async def test_a_process_without_free_descriptors_accepts_again_and_logs_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "ACCEPT_PAUSE_SECONDS", 0.02)
    log, limit = RecordedLog(), resource.getrlimit(resource.RLIMIT_NOFILE)
    async with listening(log=log) as port:
        with socket.socket() as client:
            client.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() // 2, limit[1]))
            try:
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
                await asyncio.get_running_loop().sock_sendall(client, b"GET /livez HTTP/1.1\r\n\r\n")
                await auntil(lambda: asyncio.sleep(0.01, log.warnings), seconds=10, what="it is logged")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 100), 10)
    assert status(answer) == 200
    assert log.warnings == [("http.accept_failed", {"reason": "Too many open files", "times": 1})]


def test_failures_to_accept_are_counted_in_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    log = RecordedLog()
    failures = AcceptFailures(log)
    for _ in range(1000):
        failures.add(OSError(errno.EMFILE, "Too many open files"))
    assert [each["times"] for _, each in log.warnings] == [1]
    monkeypatch.setattr(health, "LOG_INTERVAL_SECONDS", 0.0)
    failures.add(OSError(errno.EMFILE, "Too many open files"))
    assert [each["times"] for _, each in log.warnings] == [1, 1000]


async def test_a_request_that_has_arrived_is_answered_in_the_turn_that_accepts_it() -> None:
    """Goes red when asyncio accepts the connection, which takes four turns of the event loop to the answer."""
    async with listening() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
            client.setblocking(False)
            await asyncio.sleep(0)  # until the next turn begins, which finds the connection
            await asyncio.sleep(0)
            answer = client.recv(1000)
    assert status(answer) == 200


async def test_a_large_answer_arrives_whole() -> None:
    """Goes red when the part that the first turn could not send is lost."""
    body = bytes(range(256)) * 80_000
    async with listening(metrics=lambda _: ("text/plain", body)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(ASK)  # it has arrived when the connection is accepted
            reader, writer = await asyncio.open_connection(sock=client)
            _, _, received = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
            writer.close()
    assert received == body


async def test_an_error_of_one_connection_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when the listener pauses. The error is made: no network that fails so can be had here."""
    log, accept, failed = RecordedLog(), socket.socket.accept, list[int]()

    def fails_once(listening: socket.socket) -> tuple[socket.socket, Any]:
        if not failed:
            failed.append(errno.EHOSTUNREACH)
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        return accept(listening)

    monkeypatch.setattr(health, "ACCEPT_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr(socket.socket, "accept", fails_once)
    async with listening(log=log) as port:
        assert status(await sent(port, b"GET /livez HTTP/1.1\r\n\r\n")) == 200
    assert failed
    assert log.warnings == []


async def test_a_client_that_goes_before_it_is_accepted_leaves_nothing_behind() -> None:
    before = open_files()
    async with listening() as port:
        for request in (b"", HALF, b"GET /livez HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n"):
            for linger in (b"", struct.pack("ii", 1, 0)):  # the second one resets the connection
                client = socket.create_connection(("127.0.0.1", port), timeout=10)
                client.sendall(request)
                if linger:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                client.close()
        assert status(await sent(port, b"GET /livez HTTP/1.1\r\n\r\n")) == 200
        await auntil(
            lambda: asyncio.sleep(0.01, open_files() <= before + 1), seconds=10, what="the listener closes them"
        )
    assert open_files() <= before


ASK = b"GET /metrics HTTP/1.1\r\nAccept: a/b\r\naccept: c/d\r\n\r\n"


async def a_page(accept: Sequence[str]) -> tuple[str, bytes]:
    return "text/plain", ",".join(accept).encode()


def a_page_at_once(accept: Sequence[str]) -> tuple[str, bytes]:
    return "text/plain", ",".join(accept).encode()


@pytest.mark.parametrize("metrics", [a_page, a_page_at_once])
async def test_metrics_are_answered_with_their_own_type_and_get_all_lines_of_accept(metrics: Metrics) -> None:
    async with listening(metrics=metrics) as port:
        head, _, body = (await sent(port, ASK)).partition(b"\r\n\r\n")
        only_head = await sent(port, ASK.replace(b"GET", b"HEAD"))
    assert (status(head), body) == (200, b"a/b,c/d")
    assert b"content-type: text/plain\r\ncontent-length: 7\r\n" in head
    assert only_head == head + b"\r\n\r\n"


@pytest.mark.parametrize("at_once", [True, False])
async def test_metrics_that_cannot_be_rendered_are_an_error_of_the_request_alone(at_once: bool) -> None:
    def fails(_accept: Sequence[str]) -> tuple[str, bytes]:
        raise ValueError("a secret")

    async def fails_later(accept: Sequence[str]) -> tuple[str, bytes]:
        return fails(accept)

    async with listening(metrics=fails if at_once else fails_later) as port:
        answer = await sent(port, ASK)
        assert status(await sent(port, b"GET /livez HTTP/1.1\r\n\r\n")) == 200
    assert (status(answer), b"secret" in answer) == (500, False)


async def test_requests_for_metrics_beyond_the_bound_are_refused_and_livez_waits_for_none() -> None:
    go_on, asked = asyncio.Event(), list[object]()

    async def slow(accept: Sequence[str]) -> tuple[str, bytes]:
        asked.append(accept)
        await go_on.wait()
        return "text/plain", b"x"

    async with listening(metrics=slow) as port:
        waiting = [asyncio.ensure_future(sent(port, ASK)) for _ in range(METRICS_AT_ONCE)]
        await auntil(lambda: asyncio.sleep(0, len(asked) == METRICS_AT_ONCE), seconds=10, what="they are rendered")
        assert status(await sent(port, ASK)) == 503
        assert status(await sent(port, b"GET /livez HTTP/1.1\r\n\r\n")) == 200
        go_on.set()
        assert [status(answer) for answer in await asyncio.gather(*waiting)] == [200] * METRICS_AT_ONCE
        assert status(await sent(port, ASK)) == 200


async def test_a_request_that_is_rendered_when_the_listener_stops_ends_with_it() -> None:
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(_accept: Sequence[str]) -> tuple[str, bytes]:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "", b""

    async with listening(metrics=slow) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK)
        await asked.wait()
    assert await ended(reader)
    await asyncio.wait_for(cancelled.wait(), 5)
    writer.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_clients_that_never_read_hold_few_answers_and_are_closed(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Goes red when each of them keeps an answer in memory: they get a refusal, which fits into the kernel's buffer."""
    rendered: list[object] = []

    def large(accept: Sequence[str]) -> tuple[str, bytes]:
        rendered.append(accept)
        return "text/plain", b"x" * (8 << 20)

    async def large_later(accept: Sequence[str]) -> tuple[str, bytes]:
        return large(accept)

    async with listening(metrics=large if at_once else large_later) as port:
        held = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(CONNECTIONS_MAX)]
        for each in held:
            each.send(ASK)
        assert status(await sent(port, b"GET /livez HTTP/1.1\r\n\r\n")) == 200
        assert len(rendered) <= METRICS_AT_ONCE
        for each in held:
            each.close()
        monkeypatch.setattr(health, "HEAD_SECONDS", 0.05)

        async def is_answered() -> bool:
            return status(await sent(port, ASK)) == 200

        await auntil(is_answered, seconds=30, what="metrics are answered again")
