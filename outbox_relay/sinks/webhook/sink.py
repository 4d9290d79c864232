"""The webhook sink: one event, one signed request, one verdict."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from outbox_relay import signing
from outbox_relay.event import Event
from outbox_relay.policy import Attempt, Refused, Unavailable, Verdict
from outbox_relay.sinks.webhook.dial import Dialler
from outbox_relay.sinks.webhook.redaction import readable, secrets_of_url
from outbox_relay.sinks.webhook.request import Credentials, Form, Request, request
from outbox_relay.sinks.webhook.results import Rules, verdict
from outbox_relay.sinks.webhook.transport import Fault, Transport
from outbox_relay.sinks.webhook.trip import NotConnected, Trip

CHECK_SECONDS = 15.0
"""Longest wait of ``check``: for the name, the connection and the TLS handshake together."""
ALL_ENDED = "every signing secret of this sink has ended: nothing is sent unsigned"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a sink posts to. ``url`` has been checked with the settings, and is not shown.

    ``denied`` tells why an address is not dialled, ``own`` which are the relay's own; ``tls`` is the context of https.
    """

    url: str = field(repr=False)
    denied: Callable[[str], str | None]
    own: Callable[[], Collection[tuple[str, int]]] = tuple
    tls: ssl.SSLContext | None = field(default=None, repr=False)


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
        rules: Rules | None = None,
        timeout_seconds: float = 15.0,
        max_in_flight: int = 64,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_in_flight = max_in_flight
        self._name = name
        self._destination = destination
        self._credentials = credentials
        self._form = form or Form()
        self._rules = rules or Rules()
        self._url_secrets = secrets_of_url(destination.url)
        self._resets = 0
        self._transport = Transport(
            url=destination.url,
            denied=destination.denied,
            own=destination.own,
            max_connections=max_in_flight,
            tls=destination.tls,
        )

    def __repr__(self) -> str:
        return f"WebhookSink({self._name!r})"

    def renew(self, credentials: Credentials) -> None:
        """Sign with these keys and send these headers from the next request on."""
        self._credentials = credentials

    async def open(self) -> None:
        """Make ready to post; connections are made when they are needed."""
        await self._transport.open()

    async def deliver(self, batch: Sequence[Event], until: float, attempt: int = 1, /) -> Sequence[Verdict]:
        """Deliver as ``Sink.deliver`` says: one event, or none; ``attempt`` stands in the request."""
        return [await self._one(event, until, attempt) for event in batch]

    async def _one(self, event: Event, until: float, attempt: int) -> Verdict:
        if time.monotonic() >= until:
            return Unavailable("not delivered in time")
        credentials, now = self._credentials, time.time()
        if not signing.signing(credentials.keys, now):
            return Unavailable(ALL_ENDED, attempt=Attempt("config_error"))
        try:
            made = request(event, self._form, credentials, attempt=attempt, now=now)
        except ValueError as error:
            return Refused(str(error), attempt=Attempt("config_error"))
        resets = self._resets
        outcome = await self._transport.post(made.headers, made.body, self.timeout_seconds)
        if resets != self._resets and isinstance(outcome, Fault):
            return Unavailable("the sink was reset")
        return verdict(outcome, self._rules, partial(self._readable, made, credentials), time.time())

    def _readable(self, made: Request, credentials: Credentials, prefix: bytes) -> str | None:
        signatures = made.signature.split(" ")
        secrets = {*self._url_secrets, *credentials.headers.values(), *(each.partition(",")[2] for each in signatures)}
        return readable(prefix, secrets, made.body)

    async def reset(self) -> None:
        """Drop every connection; what was under way ends, and nothing of it is sent later."""
        self._resets += 1
        await self._transport.reset()

    async def check(self) -> str | None:
        """Look the name up, judge its addresses, connect and shake hands; posts nothing."""
        if not signing.signing(self._credentials.keys, time.time()):
            return ALL_ENDED
        parts = urlsplit(self._destination.url)
        secure = parts.scheme == "https"
        dialler = Dialler(
            (parts.hostname or "").removesuffix("."),
            parts.port or (443 if secure else 80),
            denied=self._destination.denied,
            own=self._destination.own,
            tls=(self._destination.tls or ssl.create_default_context()) if secure else None,
        )
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await dialler.connect(_Hangup, Trip())
        except NotConnected as fault:
            return f"{fault.code}: {fault.reason}"
        except TimeoutError:
            return f"connect_timeout: no connection was made within {CHECK_SECONDS:g} s"
        return None

    async def close(self) -> None:
        """End every request under way and close the connections."""
        self._resets += 1
        await self._transport.close()


class _Hangup(asyncio.Protocol):
    """Closes a connection as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing was to be said."""
        transport.close()
