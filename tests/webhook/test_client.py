"""From bytes to an answer: what is sent, what is kept of the answer, and that all of it ends in time and in bounds."""

from __future__ import annotations

import pytest

from outbox_relay.sinks.webhook.response import HEAD_BYTES, PREFIX_BYTES
from tests.support.receiver import Receiver
from tests.support.receiver.answers import head, raw, say
from tests.support.receiver.faults import (
    stall,
)
from tests.support.webhook_client import (
    BODY,
    QUICK_SECONDS,
    a_response,
    answered,
    no_response,
    outcome,
    post,
    posting,
)


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


@pytest.mark.parametrize("size", [0, 1 << 20])
async def test_a_body_of_any_size_arrives_byte_for_byte(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            for _ in range(2):
                assert a_response(await post(open_one, body=body)).status == 200
        assert [request.body for request in receiver.requests] == [body, body]
        assert receiver.connections == 1


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\0b", "☃"], ids=["CRLF", "NUL", "no ASCII"])
async def test_a_header_that_would_end_early_is_not_sent(value: str) -> None:
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            fault = no_response(await open_one.post([("x-custom", value)], BODY, 5), "internal", sent=False)
        assert receiver.requests == []
        assert "☃" not in fault.reason


async def test_an_answer_keeps_what_decides_and_the_beginning_of_the_body() -> None:
    headers = (
        ("Retry-After", "5"),
        ("retry-after", "7" * 10_000),
        ("X-Other", "no"),
        ("Set-Cookie", "a=b"),
        ("Location", "/é"),
    )
    found = a_response(await answered(say(503, *headers, body=b"\xff" * 10_000)))
    assert found.status == 503
    assert found.headers == {"retry-after": f"5, {'7' * 509}", "location": "/é"}
    assert found.prefix == b"\xff" * PREFIX_BYTES
    assert found.whole


async def test_the_times_of_the_parts_are_told_where_they_were_taken() -> None:
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url) as open_one:
            first, second = a_response(await post(open_one)), a_response(await post(open_one))
    assert [name for name, _ in first.timings] == ["connect", "first_byte"]
    assert [name for name, _ in second.timings] == ["first_byte"]
    assert 0 < sum(seconds for _, seconds in first.timings) <= first.seconds


async def test_the_limit_ends_a_request_that_is_not_read() -> None:
    with Receiver(at_head=stall, secrets=()) as receiver:
        body = b"x" * (16 << 20)
        no_response(await outcome(receiver.url, body=body, seconds=QUICK_SECONDS), "read_timeout", sent=True)


async def test_a_long_head_and_a_few_interim_answers_are_no_flood() -> None:
    cookie = ("set-cookie", "x" * (HEAD_BYTES - 1024))
    found = a_response(
        await answered(raw(head(100), head(103) * 3, head(200, [cookie, ("content-length", "2")]) + b"ok"))
    )
    assert (found.status, found.prefix, found.whole) == (200, b"ok", True)
