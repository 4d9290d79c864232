"""The listener: its answers, its refusals, and its bounds, which no client can exceed."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outbox_relay.service import health
from outbox_relay.service.health import CONNECTIONS_MAX, HEAD_BYTES, AcceptErrors, Health
from tests.support.logs import RecordedLog

HALF = b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: "


@asynccontextmanager
async def listening(ready: bool = True) -> AsyncGenerator[int]:
    """A listener on a free port; the port."""
    listener = Health(("127.0.0.1", 0), lambda: (ready, {"sinks": {}}))
    _, port = await listener.start()
    try:
        yield port
    finally:
        await listener.stop()


async def sent(port: int, request: bytes) -> bytes:
    """Everything that is answered to `request` until the listener ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


async def ended(reader: asyncio.StreamReader) -> bool:
    """Wait until the listener ends a connection without a word."""
    try:
        return await asyncio.wait_for(reader.read(), 30) == b""
    except ConnectionResetError:
        return True


def status(answer: bytes) -> int:
    """The status of an answer."""
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


async def test_that_nothing_can_be_accepted_is_one_line_and_not_one_for_each_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log, loop = RecordedLog(), asyncio.get_running_loop()
    complain = AcceptErrors(log)
    context = {"message": AcceptErrors.MESSAGE, "exception": OSError(errno.EMFILE, "Too many open files")}
    for _ in range(1000):
        complain(loop, context)
    assert log.warnings == [("http.accept_failed", {"reason": "Too many open files", "times": 1})]
    monkeypatch.setattr(health, "LOG_INTERVAL_SECONDS", 0.0)
    complain(loop, context)
    assert log.warnings[1][1]["times"] == 1000
    assert caplog.records == []
    complain(loop, {"message": "something else"})
    assert [record.getMessage() for record in caplog.records] == ["something else"]
    assert capsys.readouterr().out == ""
