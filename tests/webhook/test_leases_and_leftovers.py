"""Leases that expire on the way, and leftovers of one exchange that must not reach the next."""

from __future__ import annotations

import time

import pytest

from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks.webhook import addresses, connection
from outbox_relay.sinks.webhook.client import PooledClient
from outbox_relay.sinks.webhook.http_client import NoResponse, Proxy, Response
from tests.support.connect_proxy import proxying
from tests.support.names import Names
from tests.support.receiver import Behaviour, Receiver
from tests.support.receiver.answers import after, head, in_turn, raw, say
from tests.support.receiver.certificates import NAME
from tests.support.receiver.faults import CHUNKED, close, hang, then
from tests.support.wait import auntil
from tests.support.webhook_client import (
    BODY,
    HEADERS,
    LONG_SECONDS,
    a_response,
    no_response,
    post,
    posting,
)

LEASE_SECONDS = 0.5
"""A lease that is meant to expire on the way."""
EXPIRED_SECONDS = 0.7
"""By then it has expired."""
SECOND = "127.0.0.2"


async def leased(client: PooledClient) -> Response | NoResponse:
    """Post one request whose lease expires soon."""
    return await client.post(HEADERS, BODY, LONG_SECONDS, lease_clock() + LEASE_SECONDS)


async def eventually_closed(receiver: Receiver) -> None:
    """Wait until no connection is open."""

    async def closed() -> bool:
        return receiver.open == 0

    await auntil(closed, seconds=10, what="nothing is open")


async def test_a_lease_that_expires_while_the_name_is_looked_up_sends_nothing(names: Names) -> None:
    def late() -> list[str]:
        time.sleep(EXPIRED_SECONDS)
        return ["127.0.0.1"]

    names.say(NAME, late)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url.replace("127.0.0.1", NAME)) as client:
            no_response(await leased(client), "withdrawn", sent=False)
            await eventually_closed(receiver)
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


MANY = b"1\r\nx\r\n" * 10_000
FLOODS: dict[str, Behaviour] = {
    "of one byte each": raw(head(200, [CHUNKED]) + MANY + b"0\r\n\r\n"),
    "and no end": then(raw(head(200, [CHUNKED]) + MANY), hang),
}


@pytest.mark.parametrize("answer", FLOODS.values(), ids=FLOODS)
async def test_a_body_of_very_many_chunks_is_not_read_to_its_end(answer: Behaviour) -> None:
    with Receiver(in_turn(answer, say(500)), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            found = a_response(await post(client))
            assert (found.status, found.whole) == (200, False)
            assert a_response(await post(client)).status == 500
        assert receiver.connections == 2


async def test_what_is_at_the_edge_of_what_is_read_hides_no_second_answer() -> None:
    """The body ends with the last byte that is read, and another answer follows it in the same piece."""
    smuggled = head(200, [("content-length", "0")])
    answer = raw(head(200, [("content-length", "65536")]) + b"x" * 65536 + smuggled)
    with Receiver(in_turn(answer, say(500)), secrets=()) as receiver:
        async with posting(receiver.url) as client:
            a_response(await post(client))
            assert a_response(await post(client)).status == 500
        assert receiver.connections == 2


@pytest.mark.parametrize("value", ["Basic canary\r\nx: y", "Basic canary☃"])
async def test_an_authorization_that_no_header_can_hold_is_not_sent_and_not_shown(value: str) -> None:
    with Receiver(secrets=()) as receiver:
        async with proxying() as proxy:
            through = Proxy("127.0.0.1", proxy.port, value)
            async with posting(receiver.url, proxy=through) as client:
                fault = no_response(await post(client), "internal", sent=False)
            assert proxy.heads == []
    assert "canary" not in repr(fault)
