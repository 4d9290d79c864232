"""The webhook sink: one event, one signed request, one verdict."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from outbox_relay.domain.event import Event
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Attempt, Refused, Unavailable, Verdict
from outbox_relay.formats import signatures
from outbox_relay.sinks.webhook.client import HttpClient
from outbox_relay.sinks.webhook.exchange import NotConnected
from outbox_relay.sinks.webhook.proxy import Proxy
from outbox_relay.sinks.webhook.redaction import readable, secrets_of_url
from outbox_relay.sinks.webhook.request import Credentials, Form, Request, request
from outbox_relay.sinks.webhook.response import NoResponse
from outbox_relay.sinks.webhook.results import ResponsePolicy, verdict

CHECK_SECONDS = 15.0
"""Longest wait of ``check``: for the name, the connection and the TLS handshake together."""
LISTEN_SECONDS = 1.0
"""How long ``check`` listens after the handshake: with TLS 1.3 a server says only then that it wants a certificate."""
ALL_ENDED = "every signing secret of this sink has ended: nothing is sent unsigned"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a sink posts to. ``url`` has been checked with the settings, and is not shown.

    ``denied`` tells why an address is not dialled, ``own`` which are the relay's own; ``tls`` is the context of https.
    ``proxy``, host and port, is what connections go through: then neither of the first two is asked.
    """

    url: str = field(repr=False)
    denied: Callable[[str], str | None]
    own: Callable[[], Collection[tuple[str, int]]] = tuple
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    proxy: tuple[str, int] | None = None


class WebhookSink:
    """Posts each event as ``Sink`` promises: the payload's own bytes, signed, in one request.

    What it answers by the table in ``results``. Without a key that still signs nothing is sent.
    """

    max_batch = 1
    keeps_order = False

    def __init__(
        self,
        name: str,
        destination: Destination,
        credentials: Credentials,
        *,
        form: Form | None = None,
        rules: ResponsePolicy | None = None,
        timeout_seconds: float = 15.0,
        max_in_flight: int = 64,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_in_flight = max_in_flight
        self._name = name
        self._destination = destination
        self._credentials = credentials
        self._form = form or Form()
        self._rules = rules or ResponsePolicy()
        self._url_secrets = secrets_of_url(destination.url)
        self._resets = 0
        self._client = HttpClient(
            url=destination.url,
            denied=destination.denied,
            own=destination.own,
            max_connections=max_in_flight,
            tls=destination.tls,
            proxy=self._proxy(),
        )

    def __repr__(self) -> str:
        return f"WebhookSink({self._name!r})"

    def _proxy(self) -> Proxy | None:
        proxy = self._destination.proxy
        return None if proxy is None else Proxy(*proxy, lambda: self._credentials.proxy_authorization)

    def renew(self, credentials: Credentials) -> None:
        """Sign with these keys and send these headers from the next request on."""
        self._credentials = credentials

    async def open(self) -> None:
        """Make ready to post; connections are made when they are needed."""
        await self._client.open()

    async def deliver(self, batch: Sequence[Event], until: float, attempt: int = 1, /) -> Sequence[Verdict]:
        """Deliver as ``Sink.deliver`` says: one event, or none; ``attempt`` stands in the request."""
        return [await self._one(event, until, attempt) for event in batch]

    async def _one(self, event: Event, until: float, attempt: int) -> Verdict:
        if lease_clock() >= until:
            return Unavailable("not delivered in time")
        credentials, now = self._credentials, time.time()
        if not signatures.signing(credentials.keys, now):
            return Unavailable(ALL_ENDED, attempt=Attempt("config_error"))
        try:
            made = request(event, self._form, credentials, attempt=attempt, now=now)
        except Exception as error:
            unmade = f"the event cannot be made into a request ({type(error).__name__})"
            # Reasons of our own hold nothing of the event; what libraries say may.
            return Refused(str(error) if type(error) is ValueError else unmade, attempt=Attempt("config_error"))
        resets = self._resets
        outcome = await self._client.post(made.headers, made.body, self.timeout_seconds, until)
        if resets != self._resets and isinstance(outcome, NoResponse):
            return Unavailable("the sink was reset")
        if isinstance(outcome, NoResponse) and outcome.code == "withdrawn":
            return Unavailable("not delivered in time")
        return verdict(outcome, self._rules, partial(self._readable, made, credentials), time.time())

    def _readable(self, made: Request, credentials: Credentials, prefix: bytes) -> str | None:
        signatures = made.signature.split(" ")
        secrets = {
            *self._url_secrets,
            *credentials.headers.values(),
            *made.personal,
            *(each.partition(",")[2] for each in signatures),
        }
        return readable(prefix, secrets, made.body)

    async def reset(self) -> None:
        """Drop every connection; what was under way ends, and nothing of it is sent later."""
        self._resets += 1
        await self._client.reset()

    async def check(self) -> str | None:
        """Look the name up, judge its addresses, connect, shake hands and listen for a while; posts nothing."""
        if not signatures.signing(self._credentials.keys, time.time()):
            return ALL_ENDED
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await (await self._client.connect(_Listener)).wait_for_close()
        except NotConnected as error:
            return f"{error.code}: {error.reason}"
        except TimeoutError:
            return f"connect_timeout: no connection was made within {CHECK_SECONDS:g} s"

    async def close(self) -> None:
        """End every request under way and close the connections."""
        self._resets += 1
        await self._client.close()


class _Listener(asyncio.Protocol):
    """A connection over which nothing is said: whether the other side ends it."""

    def __init__(self) -> None:
        self._transport: asyncio.BaseTransport | None = None
        self._lost: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self._transport = transport

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is gone."""
        if not self._lost.done():
            self._lost.set_result(exc)

    async def wait_for_close(self) -> str | None:
        """What ended it within ``LISTEN_SECONDS``; nothing when it stands, or is none of TLS 1.3. Closes it."""
        assert self._transport is not None  # noqa: S101 - it was made before anybody got it
        secure: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object")
        try:
            if secure is None or secure.version() != "TLSv1.3":
                return None
            async with asyncio.timeout(LISTEN_SECONDS):
                error = await asyncio.shield(self._lost)
        except TimeoutError:
            return None
        finally:
            self._transport.close()
        if isinstance(error, ssl.SSLError):
            return f"tls_error: the destination ended TLS: {error.reason or 'closed'}"
        return "disconnected: the destination closed the connection right behind the TLS handshake"
