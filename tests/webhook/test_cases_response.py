"""Answers that a receiver should not give: each ends within the time limit, with bounded memory and a clear verdict."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import dataclass, field

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Delivered, Failed
from outbox_relay.sinks.contract.handing import an_event
from tests.support.receiver import Behaviour, Receiver, Request
from tests.support.receiver.answers import head, in_turn, raw, say
from tests.support.receiver.faults import (
    BODIES,
    CHUNKED,
    LENGTHS,
    STATUS_LINES,
    Flood,
    body_drip,
    close,
    drip,
    early_hints,
    endless_chunks,
    gzip_bomb,
    hang,
    header_drip,
    reset,
    switching,
    then,
)
from tests.support.wait import until
from tests.support.webhook_sink import PLENTY_SECONDS, QUICK_SECONDS, code, outcome, sending, verdict

MEMORY_BYTES = 6 << 20
"""Memory that one response may take, with everything around it."""
SYSTEM_BYTES = 24 << 20
"""More than the buffers of a connection hold on both sides."""
BROKEN = {"protocol_error", "disconnected", "connection_reset"}
NEVER = {*BROKEN, "deadline"}


@dataclass
class Case:
    """An answer, and what must come of it: delivered, or failed with one of these words."""

    answer: Behaviour
    codes: set[str] = field(default_factory=set[str])

    @property
    def late(self) -> bool:
        """Return whether only the time limit ends the request."""
        return bool(self.codes & {"deadline", "read_timeout"})


NO_ANSWER = {
    "case 40: not a byte until the deadline": Case(hang, {"read_timeout"}),
    "case 41: headers in drips": Case(header_drip, {"deadline"}),
    "case 43: informational answers 103 without end": Case(early_hints, NEVER),
    "case 43: informational answers 100 without end": Case(Flood(b"", head(100)), NEVER),
    "case 43: informational answers 103 in drips": Case(drip(b"", head(103)), NEVER),
    "case 44: an upgrade nobody asked for (101)": Case(switching, {*BROKEN, "http_101"}),
    **{
        f"case 45: {name} for a status line": Case(raw(line, close=True), {*BROKEN, "http_0", "http_600", "http_999"})
        for name, line in STATUS_LINES.items()
    },
    "case 46: a header of 200 KiB": Case(
        raw(head(200, [("x-long", "x" * 200 * 1024), ("content-length", "0")])), {"protocol_error"}
    ),
    "case 46: 5,000 headers": Case(
        raw(head(200, [(f"x-{n}", "x" * 60) for n in range(5000)] + [("content-length", "0")])), {"protocol_error"}
    ),
    "case 46: headers without end": Case(Flood(b"HTTP/1.1 200 OK\r\n", b"x-more: yes\r\n" * 100), NEVER),
    "case 48: an endless body behind a 500": Case(
        Flood(head(500, [CHUNKED]), b"10000\r\n" + b"x" * 0x10000 + b"\r\n"), {"http_500"}
    ),
    "case 42: the body of a 500 in drips": Case(drip(head(500, [("content-length", "1000000")])), {"http_500"}),
    "case 52: 304 with a body": Case(raw(head(304, [("content-length", "4")]) + b"body"), {"http_304", "redirect"}),
}
"""Each is a failed attempt: the destination may have processed the request."""

TAKEN = {
    "case 42: the body of a 200 in drips": body_drip,
    "case 48: a chunked body without end": endless_chunks,
    "case 48: a body without end and without a length": Flood(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
    "case 49: a gzip bomb of 8 MiB": raw(gzip_bomb()),
    "case 49: ten encodings on top of each other": raw(
        head(200, [("content-encoding", ", ".join(["gzip"] * 10)), ("content-length", "3")]) + b"abc"
    ),
    "case 49: brotli and zstd that are none": raw(
        head(200, [("content-encoding", "br, zstd"), ("content-length", "3")]) + b"abc"
    ),
    "case 50: gzip that is none": raw(head(200, [("content-encoding", "gzip"), ("content-length", "3")]) + b"abc"),
    "case 51: a body that is cut, by its length": raw(head(200, [("content-length", "100")]) + b"x", close=True),
    "case 51: a body that is cut, in chunks": raw(head(200, [CHUNKED]) + b"64\r\nx", close=True),
    "case 51: a body that is cut by a reset": then(raw(head(200, [("content-length", "100")]) + b"x"), reset),
    "case 51: chunks that are none": raw(head(200, [CHUNKED]) + b"zz\r\nx", close=True),
    "case 52: 204 with a body": raw(head(204, [("content-length", "4")]) + b"body"),
}
"""The status line is complete and says 2xx: delivered, whatever becomes of the body."""


@pytest.mark.parametrize("case", NO_ANSWER.values(), ids=NO_ANSWER.keys())
async def test_what_is_no_acceptance_is_a_failed_attempt(case: Case) -> None:
    with Receiver(case.answer) as receiver:
        tracemalloc.start()
        try:
            found = await outcome(receiver.url, timeout_seconds=QUICK_SECONDS if case.late else PLENTY_SECONDS)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert isinstance(found, Failed), found
        assert code(found) in case.codes
        assert found.reason.isprintable()
        assert found.reason
        assert most < MEMORY_BYTES
        assert len(receiver.requests) == 1


@pytest.mark.parametrize("answer", TAKEN.values(), ids=TAKEN.keys())
async def test_a_complete_2xx_status_line_decides(answer: Behaviour) -> None:
    with Receiver(answer) as receiver:
        tracemalloc.start()
        try:
            found = await outcome(receiver.url)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert found == DELIVERED
        assert most < MEMORY_BYTES
        assert len(receiver.requests) == 1


@pytest.mark.parametrize("headers", LENGTHS.values(), ids=[f"case 47: {name}" for name in LENGTHS])
async def test_behind_a_body_of_no_honest_length_the_connection_is_not_used_again(
    headers: list[tuple[str, str]],
) -> None:
    """Bytes after such a body could be taken for the next response: the second request must get its own 500."""
    smuggled = b"ok" + head(200, [("content-length", "0")])
    with Receiver(in_turn(raw(head(200, headers) + smuggled), say(500))) as receiver:
        async with sending(receiver.url) as sink:
            first = await verdict(sink)
            second = await verdict(sink)
        assert isinstance(first, Delivered) or code(first) in BROKEN
        assert code(second) == "http_500"
        assert [request.turn for request in receiver.requests] == [1, 1]


async def test_case_48_of_a_body_without_end_little_is_read() -> None:
    """Most of it is in the system's own buffers."""
    flood = Flood(head(200, [CHUNKED]), b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    with Receiver(flood) as receiver:
        await outcome(receiver.url)
        await asyncio.to_thread(until, lambda: receiver.open == 0, seconds=20, what="the connection is closed")
    assert flood.sent < SYSTEM_BYTES


async def test_case_53_an_early_413_while_the_body_is_sent_is_a_failed_attempt() -> None:
    """The answer may be lost when the receiver closes while the body is on its way; an attempt it is all the same."""
    with Receiver(at_head=then(say(413), close)) as receiver:
        found = await outcome(receiver.url, an_event(payload=b"x" * (1 << 20)))
        assert isinstance(found, Failed)
        assert code(found) in {"http_413", "connection_reset", "disconnected"}
        assert receiver.connections == 1


async def test_case_53_an_early_413_is_heard_when_the_receiver_reads_on() -> None:
    async def early(_request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head(413, [("content-length", "0"), ("connection", "close")]))
        await reader.readexactly(1 << 20)
        writer.close()

    with Receiver(at_head=early) as receiver:
        found = await outcome(receiver.url, an_event(payload=b"x" * (1 << 20)))
        assert isinstance(found, Failed)
        assert (code(found), found.status) == ("http_413", 413)


@pytest.mark.parametrize("body", BODIES.values(), ids=[f"case 54: {name} in the body" for name in BODIES])
async def test_what_a_body_says_is_kept_harmless(body: bytes) -> None:
    with Receiver(say(500, body=body)) as receiver:
        found = await outcome(receiver.url)
    assert isinstance(found, Failed)
    assert found.attempt is not None
    for text in (found.reason, found.attempt.answer or ""):
        assert text.isprintable()
        assert "\x1b" not in text


async def test_case_54_the_location_of_a_redirect_is_kept_harmless() -> None:
    with Receiver(
        raw(b"HTTP/1.1 302 Found\r\nlocation: https://h/\x1b[31m\xff\r\ncontent-length: 0\r\n\r\n")
    ) as receiver:
        found = await outcome(receiver.url)
    assert isinstance(found, Failed)
    assert found.reason.isprintable()


async def test_case_55_cookies_are_not_kept() -> None:
    cookies = [("set-cookie", f"c{n}={'x' * 4000}; Path=/") for n in range(10)]
    with Receiver(say(200, *cookies)) as receiver:
        async with sending(receiver.url) as sink:
            for _ in range(3):
                await verdict(sink)
        assert len(receiver.requests) == 3
        assert {request.header("cookie") for request in receiver.requests} == {None}
