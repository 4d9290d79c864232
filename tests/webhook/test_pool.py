"""The client: what it sends, connections that are kept, replaced or dropped, leases that expire on the way."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable

import pytest

from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks.webhook import addresses, connection
from outbox_relay.sinks.webhook import client as pool
from outbox_relay.sinks.webhook.client import PooledClient
from outbox_relay.sinks.webhook.http_client import NoResponse, Proxy, Response
from outbox_relay.sinks.webhook.response import PREFIX_BYTES
from tests.support.connect_proxy import proxying
from tests.support.names import Names
from tests.support.receiver import Behaviour, Receiver, Request
from tests.support.receiver.answers import after, chosen, head, in_turn, raw, say
from tests.support.receiver.certificates import NAME, Authority
from tests.support.receiver.faults import (
    close,
    hang,
    reset,
    stall,
    then,
)
from tests.support.wait import auntil
from tests.support.webhook_client import (
    BODY,
    HEADERS,
    LONG_SECONDS,
    QUICK_SECONDS,
    Gate,
    a_response,
    answered,
    no_response,
    outcome,
    post,
    posting,
    trusting,
)


def on_turn(turn: int, then_do: Behaviour, otherwise: Behaviour) -> Behaviour:
    """Return a behaviour that does ``then_do`` for request number ``turn`` of each connection, else ``otherwise``."""

    async def behave(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (then_do if request.turn == turn else otherwise)(request, reader, writer)

    return behave


async def eventually(fact: Callable[[], bool], what: str) -> None:
    """Wait until `fact` holds."""

    async def ask() -> bool:
        return fact()

    await auntil(ask, seconds=10, what=what)


async def test_a_connection_that_is_kept_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "KEPT_SECONDS", 0.1)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url) as client:
            await asyncio.gather(*(post(client) for _ in range(3)))
            assert receiver.open == 3
            await eventually(lambda: receiver.open == 0, "the kept ones are closed")
            a_response(await post(client))


@pytest.mark.parametrize("end", [close, reset], ids=["closed", "reset"])
async def test_a_kept_connection_that_ends_without_a_word_is_replaced_once(end: Behaviour) -> None:
    with Receiver(on_turn(2, end, say(200)), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            for _ in range(4):
                assert a_response(await post(client)).status == 200
        assert [(r.connection, r.turn) for r in receiver.requests] == [
            (1, 1),
            (1, 2),
            (2, 1),
            (2, 2),
            (3, 1),
            (3, 2),
            (4, 1),
        ]


async def test_only_once_is_it_sent_again() -> None:
    with Receiver(in_turn(say(200), close), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            a_response(await post(client))
            no_response(await post(client), "disconnected", sent=True)
        assert len(receiver.requests) == 3


@pytest.mark.parametrize("end", [close, reset], ids=["closed", "reset"])
async def test_after_a_byte_of_an_answer_nothing_is_sent_again(end: Behaviour) -> None:
    with Receiver(on_turn(2, then(raw(b"HTTP/1.1 200 OK\r\n"), end), say(200)), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            a_response(await post(client))
            found = await post(client)
        assert no_response(found, getattr(found, "code", ""), sent=True).code in {"disconnected", "connection_reset"}
        assert len(receiver.requests) == 2


async def test_sending_again_does_not_meet_another_stale_connection() -> None:
    """All kept connections end when the next request comes over them; each request is answered all the same."""
    gate = Gate(say(200))
    with Receiver(on_turn(1, gate, close), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            first = [asyncio.ensure_future(post(client)) for _ in range(8)]
            await eventually(lambda: gate.waiting == 8, "eight are under way")
            gate.is_open = True
            await asyncio.gather(*first)
            assert a_response(await post(client)).status == 200


async def test_sending_again_to_nobody_may_have_been_processed_before() -> None:
    with Receiver(in_turn(say(200), hang), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            a_response(await post(client))
            second = asyncio.ensure_future(post(client))
            await eventually(lambda: len(receiver.requests) == 2, "the second has arrived")
            receiver.stop()
            assert no_response(await second, "connection_refused", sent=True)


async def test_what_comes_over_a_kept_connection_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that tells an idle connection 408 before it closes it, as some do, has not answered the next request."""
    monkeypatch.setattr(pool, "KEPT_SECONDS", 60.0)
    loop = asyncio.get_running_loop()
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)

        async def answer(pieces: bytes) -> None:
            await loop.sock_recv(accepted[-1], 65536)
            await loop.sock_sendall(accepted[-1], pieces)

        async def accept() -> None:
            accepted.append((await loop.sock_accept(listening))[0])
            await answer(head(200, [("content-length", "0")]))

        async with posting(f"http://127.0.0.1:{listening.getsockname()[1]}/") as client:
            first, _ = await asyncio.gather(post(client), accept())
            assert a_response(first).status == 200
            await loop.sock_sendall(accepted[0], head(408, [("content-length", "0")]))
            async with asyncio.timeout(5):
                assert await loop.sock_recv(accepted[0], 10) == b""
            second, _ = await asyncio.gather(post(client), accept())
            assert a_response(second).status == 200
    for each in accepted:
        each.close()


async def test_a_connection_whose_request_is_not_all_sent_is_not_used_again() -> None:
    with Receiver(secrets=()) as receiver:
        receiver.at_head = then(say(413), hang)
        async with posting(receiver.url) as client:
            assert a_response(await post(client, body=b"x" * (16 << 20), seconds=5)).status == 413
            receiver.at_head = raw()
            assert a_response(await post(client)).status == 200
        assert receiver.requests[-1].connection == 2


async def cancelled_soon(client: PooledClient, noise: random.Random) -> None:
    """Cancel a request at some point of its way."""
    sent = asyncio.ensure_future(post(client))
    await asyncio.sleep(noise.choice((0, 0, 0.0005, 0.001, 0.002, 0.005)))
    sent.cancel()
    await asyncio.gather(sent, return_exceptions=True)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
async def test_a_storm_of_cancellations_takes_nothing_from_the_pool(authority: Authority, *, secure: bool) -> None:
    noise = random.Random(1)
    gate = Gate(say(200))
    with Receiver(in_turn(*[hang, say(200)] * 100), secrets=(), tls=authority.good() if secure else None) as receiver:
        async with posting(receiver.url, tls=trusting(authority)) as client:
            for _ in range(20):
                await asyncio.gather(*(cancelled_soon(client, noise) for _ in range(10)))
            await eventually(lambda: receiver.open <= 5, "the connections of cancelled requests are closed")
            # Cancelled requests may still be read, and are answered as before.
            receiver.answer = chosen(lambda request: gate if request.body == b"after" else say(200))
            posts = [asyncio.ensure_future(post(client, body=b"after")) for _ in range(5)]
            await eventually(lambda: gate.waiting >= 5, "as many as ever are under way at once")
            await eventually(lambda: receiver.open == 5, "no other is open")
            gate.is_open = True
            assert {a_response(found).status for found in await asyncio.gather(*posts)} == {200}


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


LEASE_SECONDS = 0.5
"""A lease that is meant to expire on the way."""
EXPIRED_SECONDS = 0.7
"""By then it has expired."""
SECOND = "127.0.0.2"


async def leased(client: PooledClient) -> Response | NoResponse:
    """Post one request whose lease expires soon."""
    return await client.post(HEADERS, BODY, LONG_SECONDS, lease_clock() + LEASE_SECONDS)


async def test_a_lease_that_expires_while_the_name_is_looked_up_sends_nothing(names: Names) -> None:
    def late() -> list[str]:
        time.sleep(EXPIRED_SECONDS)
        return ["127.0.0.1"]

    names.say(NAME, late)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url.replace("127.0.0.1", NAME)) as client:
            no_response(await leased(client), "withdrawn", sent=False)
            await eventually(lambda: receiver.open == 0, "nothing is open")
        assert receiver.requests == []


async def test_a_lease_that_expires_before_a_closed_connection_is_found_sends_nothing_again() -> None:
    with Receiver(in_turn(say(200), after(EXPIRED_SECONDS, close), say(200)), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            a_response(await post(client))
            no_response(await leased(client), "withdrawn", sent=True)
        assert len(receiver.requests) == 2


async def test_a_request_that_is_sent_again_goes_to_an_address_that_is_judged_again(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "KEPT_SECONDS", 0.0)
    names.in_turn(NAME, ["127.0.0.1"], [SECOND])
    with (
        Receiver(in_turn(say(200), close), secrets=()) as receiver,
        Receiver(host=SECOND, port=receiver.port, secrets=()) as inner,
    ):
        url = receiver.url.replace("127.0.0.1", NAME)
        async with posting(url, judge=lambda address: "inside" if address == SECOND else None) as client:
            a_response(await post(client))
            no_response(await post(client), "ssrf_blocked", sent=True)
        assert inner.connections == 0


async def test_the_time_limit_of_one_body_does_not_cut_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_SECONDS", 1.0)
    slow = then(raw(head(200, [("content-length", "2")]) + b"o"), after(0.4, raw(b"k")))
    with Receiver(slow, secrets=()) as receiver:
        async with posting(receiver.url) as client:
            for _ in range(3):
                assert a_response(await post(client)).whole
        assert receiver.connections == 1


@pytest.mark.parametrize("value", ["Basic canary\r\nx: y", "Basic canary☃"])
async def test_an_authorization_that_no_header_can_hold_is_not_sent_and_not_shown(value: str) -> None:
    with Receiver(secrets=()) as receiver:
        async with proxying() as proxy:
            through = Proxy("127.0.0.1", proxy.port, value)
            async with posting(receiver.url, proxy=through) as client:
                fault = no_response(await post(client), "internal", sent=False)
            assert proxy.heads == []
    assert "canary" not in repr(fault)
