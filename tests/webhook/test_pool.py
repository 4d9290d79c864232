"""Connections: kept and used again, replaced when found closed, dropped, and never lost to a cancellation."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable

import pytest

from outbox_relay.sinks.webhook import connection, pool
from outbox_relay.sinks.webhook.client import HttpClient
from outbox_relay.sinks.webhook.exchange import Exchange
from outbox_relay.sinks.webhook.response import Response
from tests.support.receiver import Behaviour, Receiver, Request
from tests.support.receiver.answers import chosen, head, in_turn, raw, say
from tests.support.receiver.certificates import Authority
from tests.support.receiver.faults import close, drip, hang, reset, stale, then
from tests.support.wait import auntil
from tests.support.webhook_client import (
    BODY,
    HEADERS,
    LATE_SECONDS,
    QUICK_SECONDS,
    Gate,
    a_response,
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


async def test_requests_one_after_the_other_use_one_connection() -> None:
    with Receiver(say(200, body=b"ok"), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            for _ in range(20):
                a_response(await post(client))
        assert receiver.connections == 1


async def test_no_more_connections_than_allowed_and_all_of_them_are_kept() -> None:
    gate = Gate(say(200))
    with Receiver(gate, secrets=()) as receiver:
        async with posting(receiver.url, connections=5) as client:
            posts = [asyncio.ensure_future(post(client)) for _ in range(20)]
            await eventually(lambda: gate.waiting == 5, "five requests are under way")
            assert receiver.connections == 5
            gate.is_open = True
            assert {a_response(found).status for found in await asyncio.gather(*posts)} == {200}
            await asyncio.gather(*(post(client) for _ in range(5)))
            assert receiver.connections == 5


async def test_who_finds_no_connection_free_in_time_has_sent_nothing() -> None:
    with Receiver(hang, secrets=()) as receiver:
        async with posting(receiver.url, connections=1) as client:
            first = asyncio.ensure_future(post(client, seconds=5))
            await eventually(lambda: len(receiver.requests) == 1, "the first is under way")
            no_response(await post(client, seconds=QUICK_SECONDS), "deadline", sent=False)
            first.cancel()


async def test_a_connection_that_is_kept_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "KEPT_SECONDS", 0.1)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url, connections=3) as client:
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


async def test_over_a_new_connection_nothing_is_sent_again() -> None:
    with Receiver(close, secrets=()) as receiver:
        no_response(await outcome(receiver.url), "disconnected", sent=True)
        assert len(receiver.requests) == 1


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
        async with posting(receiver.url, connections=8) as client:
            first = [asyncio.ensure_future(post(client)) for _ in range(8)]
            await eventually(lambda: gate.waiting == 8, "eight are under way")
            gate.is_open = True
            await asyncio.gather(*first)
            assert a_response(await post(client)).status == 200


async def test_sending_again_keeps_to_the_same_limit() -> None:
    with Receiver(in_turn(say(200), close, hang), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            a_response(await post(client))
            fault = no_response(await post(client, seconds=QUICK_SECONDS), "read_timeout", sent=True)
            assert fault.seconds < LATE_SECONDS
        assert len(receiver.requests) == 3


async def test_sending_again_to_nobody_may_have_been_processed_before() -> None:
    with Receiver(in_turn(say(200), hang), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            a_response(await post(client))
            second = asyncio.ensure_future(post(client))
            await eventually(lambda: len(receiver.requests) == 2, "the second has arrived")
            receiver.stop()
            assert no_response(await second, "connection_refused", sent=True)


async def test_a_connection_that_the_receiver_closed_behind_the_answer_is_not_used_again() -> None:
    with Receiver(stale, secrets=()) as receiver:
        async with posting(receiver.url) as client:
            for _ in range(5):
                assert a_response(await post(client)).status == 200
        assert len({request.connection for request in receiver.requests}) == 5


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


async def cancelled_soon(client: HttpClient, noise: random.Random) -> None:
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
        async with posting(receiver.url, connections=5, tls=trusting(authority)) as client:
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


async def test_a_reset_ends_what_is_under_way_and_nothing_of_it_is_sent_later() -> None:
    with Receiver(hang, secrets=()) as receiver:
        async with posting(receiver.url, connections=2) as client:
            posts = [asyncio.ensure_future(post(client)) for _ in range(6)]
            await eventually(lambda: len(receiver.requests) == 2, "two are under way, four wait")
            await client.reset()
            found = await asyncio.gather(*posts)
            assert {(each.code, each.sent) for each in found if not isinstance(each, Response)} == {
                ("withdrawn", True),
                ("withdrawn", False),
            }
            receiver.answer = say(200)
            assert a_response(await post(client)).status == 200
        assert len(receiver.requests) == 3


async def test_a_reset_while_a_connection_is_made_sends_nothing_over_it(authority: Authority) -> None:
    """The handshake is held up until the transport was reset."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with posting(f"https://127.0.0.1:{listening.getsockname()[1]}/", tls=trusting(authority)) as client:
            sent = asyncio.ensure_future(post(client))
            accepted, _ = await asyncio.to_thread(listening.accept)
            with accepted:
                assert await asyncio.to_thread(accepted.recv, 1)
                await client.reset()
                assert no_response(await sent, "withdrawn", sent=False).seconds < LATE_SECONDS


async def test_a_reset_at_any_moment_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the moment when a connection has just been made and the request has not been written to it."""
    real = Exchange.begin_sending
    too_late: list[bool] = []

    def noted(exchange: Exchange) -> None:
        withdrawn = exchange.withdrawn
        real(exchange)
        too_late.append(withdrawn)

    monkeypatch.setattr(Exchange, "begin_sending", noted)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url, connections=3) as client:
            for moments in range(40):
                posts = [asyncio.ensure_future(post(client)) for _ in range(3)]
                for _ in range(moments):
                    await asyncio.sleep(0)
                await client.reset()
                await asyncio.gather(*posts)
                a_response(await post(client))
    assert too_late
    assert not any(too_late)


async def test_a_body_under_way_does_not_hold_up_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_SECONDS", 20.0)
    with Receiver(drip(head(200, [("content-length", "1000")])), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            sent = asyncio.ensure_future(client.post(HEADERS, BODY, 20))
            await eventually(lambda: len(receiver.requests) == 1, "it has arrived")
            await asyncio.sleep(0.05)  # the head of the answer is there, most likely; if not, less is shown
            await client.reset()
            found = await sent
            assert found.seconds < LATE_SECONDS


async def test_it_opens_again_after_it_was_closed() -> None:
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url) as client:
            a_response(await post(client))
            await client.close()
            await client.close()
            await eventually(lambda: receiver.open == 0, "nothing is kept")
            await client.open()
            a_response(await post(client))
