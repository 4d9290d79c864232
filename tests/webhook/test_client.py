"""From bytes to an answer: what is sent, what is kept of the answer, and that all of it ends in time and in bounds."""

from __future__ import annotations

import asyncio
import gzip
import logging
import tracemalloc

import pytest

from outbox_relay.sinks.webhook import connection
from outbox_relay.sinks.webhook.reader import BODY_BYTES, HEAD_BYTES, PREFIX_BYTES
from tests.support.receiver import Behaviour, Receiver
from tests.support.receiver.answers import after, head, raw, say
from tests.support.receiver.faults import (
    CHUNKED,
    LENGTHS,
    Flood,
    body_drip,
    close,
    drip,
    early_hints,
    endless_chunks,
    hang,
    header_drip,
    reset,
    stall,
    switching,
    then,
)
from tests.support.webhook_client import (
    BODY,
    HEADERS,
    LATE_SECONDS,
    LONG_SECONDS,
    QUICK_SECONDS,
    a_response,
    answered,
    no_response,
    outcome,
    post,
    posting,
)

MEMORY_BYTES = 4 << 20


async def test_a_request_is_what_was_handed_over_and_host_and_length() -> None:
    with Receiver(secrets=()) as receiver:
        found = a_response(await outcome(f"{receiver.url}?token=a%2Fb&x=%41", body=b"\x00\xff\r\n\r\n" * 3))
        [request] = receiver.requests
    assert (found.status, found.whole, found.prefix) == (200, True, b"")
    assert (request.method, request.target) == ("POST", "/hooks?token=a%2Fb&x=%41")
    assert request.body == b"\x00\xff\r\n\r\n" * 3
    own = (("host", f"127.0.0.1:{receiver.port}"), ("content-length", "18"))
    assert sorted(request.headers) == sorted((*HEADERS, *own))


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("", "/"),
        ("?a=%2F&b=", "/?a=%2F&b="),
        ('/{a}/"b"/<c>/`d`/%7e', "/%7Ba%7D/%22b%22/%3Cc%3E/%60d%60/%7e"),
        ("/a/../b;c=1/[d]?e=f/g?h", "/a/../b;c=1/[d]?e=f/g?h"),
    ],
)
async def test_a_path_is_sent_as_it_is_written_but_for_what_no_target_may_hold(path: str, target: str) -> None:
    with Receiver(secrets=()) as receiver:
        a_response(await outcome(f"http://127.0.0.1:{receiver.port}{path}"))
    assert receiver.requests[0].target == target


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
async def test_a_body_of_any_size_arrives_byte_for_byte(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            for _ in range(2):
                assert a_response(await post(open_one, body=body)).status == 200
        assert [request.body for request in receiver.requests] == [body, body]
        assert receiver.connections == 1


async def test_a_length_or_host_that_is_handed_over_is_not_sent_twice() -> None:
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            headers = [*HEADERS, ("Content-Length", "999"), ("Host", "elsewhere.test")]
            a_response(await open_one.post(headers, BODY, 5))
        assert receiver.requests[0].header("content-length") == str(len(BODY))
        assert receiver.requests[0].header("host") == f"127.0.0.1:{receiver.port}"


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\0b", "☃"], ids=["CRLF", "LF", "NUL", "no ASCII"])
async def test_a_header_that_would_end_early_is_not_sent(value: str) -> None:
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            fault = no_response(await open_one.post([("x-custom", value)], BODY, 5), "internal", sent=False)
        assert receiver.requests == []
        assert "☃" not in fault.reason


async def test_an_answer_keeps_what_decides_and_the_beginning_of_the_body() -> None:
    headers = (("Retry-After", "5"), ("retry-after", "7"), ("X-Other", "no"), ("Set-Cookie", "a=b"), ("Location", "/é"))
    found = a_response(await answered(say(503, *headers, body=b"\xff" * 10_000)))
    assert found.status == 503
    assert found.headers == {"retry-after": "5, 7", "location": "/é"}
    assert found.prefix == b"\xff" * PREFIX_BYTES
    assert found.whole


async def test_the_value_of_a_header_is_clipped() -> None:
    found = a_response(await answered(say(429, ("retry-after", "9" * 10_000))))
    assert len(found.headers["retry-after"]) == 512


async def test_the_times_of_the_parts_are_told_where_they_were_taken() -> None:
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            first, second = a_response(await post(open_one)), a_response(await post(open_one))
    assert [name for name, _ in first.timings] == ["connect", "first_byte"]
    assert [name for name, _ in second.timings] == ["first_byte"]
    assert 0 < sum(seconds for _, seconds in first.timings) <= first.seconds


async def test_redirects_are_answers_and_cookies_are_not_kept() -> None:
    with Receiver(secrets=()) as receiver:
        receiver.answer = say(307, ("location", f"{receiver.url}/other"), ("set-cookie", "a=b"))
        async with posting(receiver.url) as open_one:
            for _ in range(2):
                assert a_response(await post(open_one)).status == 307
        assert [(r.target, r.header("cookie")) for r in receiver.requests] == [("/hooks", None)] * 2


async def test_the_environment_sets_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert a_response(await answered(say(204))).status == 204


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (hang, "read_timeout"),
        (header_drip, "deadline"),
        (drip(b"", head(103), 0.02), "deadline"),
        (drip(b"HTTP/1.1 200 OK\r\nx: ", b"\r\n y", 0.02), "deadline"),
    ],
    ids=["no word", "a head by drips", "interim answers by drips", "a folded header by drips"],
)
async def test_the_limit_ends_what_never_becomes_an_answer(behaviour: Behaviour, code: str) -> None:
    fault = no_response(await answered(behaviour, seconds=QUICK_SECONDS), code, sent=True)
    assert QUICK_SECONDS <= fault.seconds < LATE_SECONDS


async def test_the_limit_ends_a_request_that_is_not_read() -> None:
    with Receiver(at_head=stall, secrets=()) as receiver:
        body = b"x" * (16 << 20)
        no_response(await outcome(receiver.url, body=body, seconds=QUICK_SECONDS), "read_timeout", sent=True)


@pytest.mark.parametrize("status", [200, 500])
async def test_a_body_by_drips_is_read_for_a_second_and_the_status_stands(status: int) -> None:
    length = [("content-length", "1000")]
    found = a_response(await answered(drip(head(status, length), b"x"), seconds=QUICK_SECONDS))
    assert (found.status, found.whole) == (status, False)
    assert found.prefix.startswith(b"x")


async def test_a_body_by_drips_does_not_use_up_a_long_limit() -> None:
    found = a_response(await answered(body_drip))
    assert (found.status, found.whole) == (200, False)
    assert 1 <= found.seconds < 5


@pytest.mark.parametrize(
    ("behaviour", "status"),
    [
        (endless_chunks, 200),
        (Flood(head(500, [("content-length", "1000000000")]), b"x" * 65536), 500),
        (Flood(head(200), b"x" * 65536), 200),
    ],
    ids=["chunks", "a length", "until the end"],
)
async def test_an_endless_body_costs_no_memory(behaviour: Behaviour, status: int) -> None:
    with Receiver(behaviour, secrets=()) as receiver:
        tracemalloc.start()
        try:
            found = a_response(await outcome(receiver.url))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert found.status == status
    assert len(found.prefix) == PREFIX_BYTES
    assert most < MEMORY_BYTES
    assert found.seconds < 2


async def test_what_is_packed_is_kept_as_it_came() -> None:
    packed = gzip.compress(bytes(8 << 20))
    found = a_response(await answered(say(200, ("content-encoding", "gzip"), body=packed)))
    assert found.prefix == packed[:PREFIX_BYTES]
    assert found.whole


async def test_a_body_longer_than_what_is_read_ends_the_connection() -> None:
    with Receiver(say(200, body=b"x" * (4 * BODY_BYTES)), secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            assert not a_response(await post(open_one)).whole
            receiver.answer = say(200, body=b"x" * BODY_BYTES)
            assert a_response(await post(open_one)).whole
            assert a_response(await post(open_one)).whole
        assert receiver.connections == 2


@pytest.mark.parametrize(
    "behaviour",
    [
        early_hints,
        raw(head(200, [(f"x-{n}", "y" * 100) for n in range(2000)])),
        raw(head(200, [("x", "y" * (200 << 10))])),
        raw(head(200, [(f"x-{n}", "y" * 8000) for n in range(100)])),
        raw(head(103) * 100 + head(200)),
        raw(head(200, [("x", "") for _ in range(600)])),
        Flood(b"HTTP/1.1 200 OK\r\nx: ", b"y" * 1000),
        Flood(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 1000),
    ],
    ids=[
        "interim answers",
        "2,000 headers",
        "one of 200 KiB",
        "a hundred of 8 KiB",
        "a hundred interim answers",
        "600 headers",
        "an endless one",
        "headers without end",
    ],
)
async def test_a_flood_before_the_body_is_refused_at_once_and_costs_no_memory(behaviour: Behaviour) -> None:
    with Receiver(behaviour, secrets=()) as receiver:
        tracemalloc.start()
        try:
            fault = no_response(await outcome(receiver.url), "protocol_error", sent=True)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < MEMORY_BYTES
    assert fault.seconds < 5


async def test_a_long_head_and_a_few_interim_answers_are_no_flood() -> None:
    cookie = ("set-cookie", "x" * (HEAD_BYTES - 1024))
    found = a_response(
        await answered(raw(head(100), head(103) * 3, head(200, [cookie, ("content-length", "2")]) + b"ok"))
    )
    assert (found.status, found.prefix, found.whole) == (200, b"ok", True)


async def test_a_head_in_single_bytes_is_a_head() -> None:
    answer = head(103) + head(200, [CHUNKED]) + b"2\r\nok\r\n0\r\n\r\n"
    pieces = [answer[n : n + 1] for n in range(len(answer))]
    behaviour = raw(pieces[0])
    for piece in pieces[1:]:
        behaviour = then(behaviour, after(0.001, raw(piece)))
    found = a_response(await answered(behaviour))
    assert (found.status, found.prefix, found.whole) == (200, b"ok", True)


CHUNKS_TO_COME = head(200, [CHUNKED])
BROKEN_BODIES = {
    "shorter than its length": raw(head(200, [("content-length", "10")]) + b"ok", close=True),
    "reset in the middle": then(raw(head(200, [("content-length", "10")]) + b"ok"), reset),
    "a chunk cut off": raw(head(200, [CHUNKED]) + b"a\r\nok", close=True),
    "a chunk of no length": raw(head(200, [CHUNKED]) + b"zz\r\nok\r\n"),
    "a chunk without its end": raw(head(200, [CHUNKED]) + b"2\r\nokokok\r\n"),
    "a chunk of no length behind a head in two pieces": then(
        raw(CHUNKS_TO_COME[:-2]), after(0.05, raw(CHUNKS_TO_COME[-2:] + b"zz\r\nok\r\n"))
    ),
    "a chunk of no length, later": then(raw(head(200, [CHUNKED])), after(0.05, raw(b"zz\r\nok\r\n"))),
}


@pytest.mark.parametrize("behaviour", BROKEN_BODIES.values(), ids=BROKEN_BODIES)
async def test_a_complete_head_decides_whatever_the_body_is(
    behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the rest of a broken body is not waited for."""
    monkeypatch.setattr(connection, "BODY_SECONDS", LONG_SECONDS)
    found = a_response(await answered(behaviour))
    assert (found.status, found.whole) == (200, False)
    assert found.seconds < LATE_SECONDS


@pytest.mark.parametrize("status", [204, 304])
async def test_a_body_where_there_is_none_ends_the_connection_and_nothing_else(status: int) -> None:
    with Receiver(raw(head(status, [("content-length", "5")]) + b"hello"), secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            for _ in range(2):
                assert a_response(await post(open_one)).status == status
        assert receiver.connections == 2


async def test_bytes_behind_an_answer_answer_nothing() -> None:
    """A second answer in the same piece is not taken for that of the next request."""
    with Receiver(
        raw(head(200, [("content-length", "0")]) + head(500, [("content-length", "0")])), secrets=()
    ) as receiver:
        async with posting(receiver.url) as open_one:
            for _ in range(3):
                assert a_response(await post(open_one)).status == 200
        assert receiver.connections == 3


FAULTS = {
    "switching protocols": (switching, "protocol_error"),
    "garbage": (raw(b"\x00\xff\x16\x03\r\n\r\n", close=True), "protocol_error"),
    "another protocol": (raw(b"SSH-2.0-OpenSSH_9.2\r\n", close=True), "protocol_error"),
    "no word": (close, "disconnected"),
    "half a head": (raw(b"HTTP/1.1 200 OK\r\nx: ", close=True), "disconnected"),
    "a reset": (reset, "connection_reset"),
    "a reset in the head": (then(raw(b"HTTP/1.1 200 OK\r\n"), after(0.05, reset)), "connection_reset"),
    "two lengths": (raw(head(200, LENGTHS["two different lengths"]) + b"ok", close=True), "protocol_error"),
    "a negative length": (raw(head(200, LENGTHS["negative length"]) + b"ok", close=True), "protocol_error"),
    "length and chunks": (raw(head(200, LENGTHS["length and chunked"]) + b"ok", close=True), "protocol_error"),
    "HTTP/2.0": (raw(b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n"), "protocol_error"),
    "a status of two digits": (raw(b"HTTP/1.1 99 Odd\r\n\r\n", close=True), "protocol_error"),
    "status 0": (raw(b"HTTP/1.1 0 None\r\n\r\n", close=True), "protocol_error"),
    "status 000": (raw(b"HTTP/1.1 000 None\r\n\r\n", close=True), "protocol_error"),
}


@pytest.mark.parametrize(("behaviour", "code"), FAULTS.values(), ids=FAULTS)
async def test_what_is_no_answer_is_a_fault(behaviour: Behaviour, code: str) -> None:
    assert no_response(await answered(behaviour), code, sent=True).seconds < 5


async def test_no_fault_shows_the_url_or_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for behaviour, _ in (*FAULTS.values(), (hang, "")):
            with Receiver(behaviour, secrets=()) as receiver:
                found = await outcome(f"{receiver.url}?token=canary", seconds=QUICK_SECONDS)
                assert "canary" not in repr(found)
                assert "OpenSSH" not in repr(found)
    assert "canary" not in caplog.text
    assert "hooks" not in caplog.text


async def test_an_early_refusal_is_heard_although_the_body_was_not_read() -> None:
    with Receiver(at_head=then(say(413), stall), secrets=()) as receiver:
        found = await outcome(receiver.url, body=b"x" * (8 << 20), seconds=5)
    assert a_response(found).status == 413


async def test_a_cancelled_request_is_cancelled() -> None:
    with Receiver(hang, secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await post(open_one)


async def test_a_client_that_is_not_open_says_so() -> None:
    async with posting("http://127.0.0.1:9/") as open_one:
        pass
    with pytest.raises(RuntimeError, match="not open"):
        await post(open_one)
