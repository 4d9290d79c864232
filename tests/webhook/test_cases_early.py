"""Bytes that are no response to the request: before it, or after a response."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Unavailable
from outbox_relay.sinks.webhook.connection import HttpConnection
from outbox_relay.sinks.webhook.connector import Connector
from tests.support.receiver import Behaviour, Receiver, Request
from tests.support.receiver.answers import head, in_turn, raw, say
from tests.support.receiver.certificates import Authority
from tests.support.receiver.faults import close
from tests.support.webhook_sink import code, outcome, sending, verdict

OK = head(200, [("content-length", "0")])
READABLE_SECONDS = 10


def readable(made: asyncio.BaseTransport) -> bool:
    """Return whether the system holds unread bytes of a connection, or its end."""
    poll = select.poll()
    poll.register(made.get_extra_info("socket"), select.POLLIN)
    return bool(poll.poll(READABLE_SECONDS * 1000))


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.BaseTransport]:
    """Return the connections that the sink has made, in order."""
    made: list[asyncio.BaseTransport] = []
    real = HttpConnection.connection_made

    def noted(self: HttpConnection, transport: asyncio.BaseTransport) -> None:
        made.append(transport)
        real(self, transport)

    monkeypatch.setattr(HttpConnection, "connection_made", noted)
    return made


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, connections: list[asyncio.BaseTransport]) -> None:
    """Let a new connection be used only once the system has heard something over it, which nothing has read."""
    connect: Callable[..., Awaitable[Any]] = Connector.connect

    async def patient(self: Connector, *args: Any) -> Any:
        connected = await connect(self, *args)
        assert readable(connections[-1])  # blocks the loop: nothing reads it meanwhile
        return connected

    monkeypatch.setattr(Connector, "connect", patient)


@pytest.mark.usefixtures("heard")
async def test_case_65_an_answer_before_the_request_delivers_nothing() -> None:
    with Receiver(say(200), at_accept=raw(OK)) as receiver:
        found = await outcome(receiver.url)
        assert receiver.requests == []
    assert isinstance(found, Unavailable)
    assert (code(found), found.reason) == ("protocol_error", "the destination answered before the request was sent")


@pytest.mark.usefixtures("heard")
async def test_case_65_tickets_of_tls_are_no_answer(authority: Authority) -> None:
    """A server of TLS 1.3 sends them right after the handshake, unasked."""
    with Receiver(tls=authority.good()) as receiver:
        assert await outcome(receiver.url, ca_file=authority.certificate_file) == DELIVERED


@pytest.mark.usefixtures("heard")
async def test_case_65_a_new_connection_that_is_closed_before_the_request_counts_no_attempt() -> None:
    with Receiver(at_accept=close) as receiver:
        found = await outcome(receiver.url)
    assert isinstance(found, Unavailable)
    assert code(found) == "disconnected"


async def test_case_65_a_kept_connection_that_speaks_unasked_is_not_used_again(
    connections: list[asyncio.BaseTransport],
) -> None:
    speak = threading.Event()

    async def twice(_request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        await asyncio.to_thread(speak.wait, READABLE_SECONDS)
        writer.write(OK)
        await writer.drain()

    with Receiver(in_turn(twice, say(500))) as receiver:
        async with sending(receiver.url) as sink:
            assert await verdict(sink) == DELIVERED
            # From here on the loop does nothing but the second request: what is unread then was not asked for.
            speak.set()
            assert readable(connections[0])
            assert code(await verdict(sink)) == "http_500"
        assert receiver.connections == 2


BEHIND: dict[str, Behaviour] = {
    "a line": raw(OK + b"\r\n"),
    "a body where none may be": raw(head(204) + b"HTTP/1.1 2"),
    "the beginning of a head behind chunks": raw(
        head(200, [("transfer-encoding", "chunked")]) + b"2\r\n{}\r\n0\r\n\r\nHTTP/1.1 2"
    ),
}


@pytest.mark.parametrize("answer", BEHIND.values(), ids=BEHIND)
async def test_case_66_behind_an_answer_with_more_bytes_the_connection_is_not_used_again(answer: Behaviour) -> None:
    with Receiver(in_turn(answer, say(200))) as receiver:
        async with sending(receiver.url) as sink:
            assert [await verdict(sink), await verdict(sink)] == [DELIVERED, DELIVERED]
        assert (receiver.connections, len(receiver.requests)) == (2, 2)
