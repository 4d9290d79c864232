"""The HTTP client of the webhook sink, without the sink."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from outbox_relay.settings.addresses import denied
from outbox_relay.sinks.webhook.client import PooledClient
from outbox_relay.sinks.webhook.connector import Connector
from outbox_relay.sinks.webhook.http_client import Endpoint, NoResponse, Proxy, Response
from tests.support.receiver import Behaviour, Receiver, Request
from tests.support.receiver.certificates import Authority

HEADERS = [("content-type", "application/json"), ("accept-encoding", "identity"), ("webhook-id", "one")]
BODY = b'{"id":1}'
LONG_SECONDS = 20.0
"""A limit that no test is meant to meet."""
QUICK_SECONDS = 0.5
"""A limit that a test is meant to meet."""
LATE_SECONDS = 4.0
"""By then everything that the quick limit ends has ended, and nothing that another limit ends."""


def anywhere(_address: str) -> str | None:
    """Deny no address."""
    return None


def fenced(address: str) -> str | None:
    """Deny private addresses, as the settings do by default."""
    return denied(address, ())


@asynccontextmanager
async def posting(
    url: str,
    *,
    judge: Callable[[str], str | None] = anywhere,
    own: Collection[tuple[str, int]] = (),
    tls: ssl.SSLContext | None = None,
    proxy: Proxy | None = None,
) -> AsyncGenerator[PooledClient]:
    """Yield a client, and end its connections."""
    connector = Connector(Endpoint(url, judge, lambda: own, tls, proxy))
    try:
        yield PooledClient(url, connector)
    finally:
        connector.reset()


async def post(client: PooledClient, *, body: bytes = BODY, seconds: float = LONG_SECONDS) -> Response | NoResponse:
    """Post one request."""
    return await client.post(HEADERS, body, seconds)


async def outcome(url: str, *, body: bytes = BODY, seconds: float = LONG_SECONDS, **made: Any) -> Response | NoResponse:
    """Return what comes of one request over a client of its own."""
    async with posting(url, **made) as client:
        return await post(client, body=body, seconds=seconds)


async def answered(behaviour: Behaviour, *, seconds: float = LONG_SECONDS) -> Response | NoResponse:
    """Return what comes of one request to a receiver with this behaviour."""
    with Receiver(behaviour, secrets=()) as receiver:
        return await outcome(receiver.url, seconds=seconds)


def a_response(found: Response | NoResponse) -> Response:
    """Return `found`, which must be a response."""
    assert isinstance(found, Response), found
    return found


def no_response(found: Response | NoResponse, code: str, *, sent: bool) -> NoResponse:
    """Return `found`, which must be the lack of a response, for this reason."""
    assert isinstance(found, NoResponse), found
    assert (found.code, found.sent) == (code, sent), found
    return found


def trusting(authority: Authority) -> ssl.SSLContext:
    """Return a client's context that trusts the tests' authority alone."""
    return ssl.create_default_context(cafile=str(authority.certificate_file))


class Gate:
    """A behaviour that waits until the test opens it, and counts the requests that wait."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.waiting = 0
        self.is_open = False
        self._behaviour = behaviour

    async def __call__(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.waiting += 1
        while not self.is_open and not writer.is_closing():  # noqa: ASYNC110 - opened from another thread
            await asyncio.sleep(0.005)
        await self._behaviour(request, reader, writer)
