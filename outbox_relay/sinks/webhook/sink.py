"""The webhook sink: one event, one signed request, one verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Refused, Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.formats import signatures
from outbox_relay.sinks.webhook.client import PooledClient
from outbox_relay.sinks.webhook.connection import ExchangeFailed
from outbox_relay.sinks.webhook.connector import Connector
from outbox_relay.sinks.webhook.http_client import Endpoint, HttpClient, NoResponse, Response
from outbox_relay.sinks.webhook.redaction import readable, secrets_of_url, url_without_secrets
from outbox_relay.sinks.webhook.request import Credentials, Request, RequestFormat, make_request
from outbox_relay.sinks.webhook.response import PREFIX_BYTES
from outbox_relay.sinks.webhook.results import ResponsePolicy, verdict

LATE = Unavailable("not sent before its lease ended", behind=True, untouched=True)
"""The verdict of an event whose connection took too long, for a slow look-up for example. It says nothing more."""
ALL_ENDED = "every signing secret of this sink has ended: nothing is sent unsigned"


class WebhookSink:
    """A client that posts each event in one signed request, with the payload's own bytes as its body.

    ``results`` turns responses into verdicts. Nothing is sent without a key that still signs.

    With ``delivery_details`` the verdict of every delivered event has the status and the duration. Otherwise only that
    of an event that has a row has them.
    """

    max_batch = 1
    keeps_order = False

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        credentials: Credentials,
        *,
        request_format: RequestFormat | None = None,
        policy: ResponsePolicy | None = None,
        timeout_seconds: float = 15.0,
        max_in_flight: int = 64,
        delivery_details: bool = False,
    ) -> None:
        self._request_seconds = timeout_seconds
        self.max_in_flight = max_in_flight
        self._name = name
        self.delivery_details = delivery_details
        self._endpoint = endpoint
        self._credentials = credentials
        self._format = request_format or RequestFormat()
        self._policy = policy or ResponsePolicy()
        self._url_secrets = secrets_of_url(endpoint.url)
        self._connector = Connector(endpoint)
        self._client: HttpClient = PooledClient(endpoint.url, self._connector)
        self.timeout_seconds = timeout_seconds + self._connector.lookup_seconds

    def __repr__(self) -> str:
        return f"WebhookSink({self._name!r})"

    @property
    def shown_url(self) -> str:
        """Return the URL without the parts that may be secret."""
        return url_without_secrets(self._endpoint.url)

    async def open(self) -> None:
        """Do nothing: connections are made when they are needed."""

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        """Deliver one event. Its request has the number ``attempt``, from 1.

        ``until`` is compared here, and by ``HttpConnection.send`` right before the request is written.
        """
        return [await self._one(event, until, attempt) for event in batch]

    async def _one(self, event: StoredEvent, until: float, attempt: int) -> Verdict:
        if lease_clock() >= until:
            return LATE
        credentials, now = self._credentials, time.time()
        if not signatures.active_keys(credentials.keys, now):
            return Unavailable(ALL_ENDED, attempt=Attempt("config_error"))
        try:
            made = make_request(event, self._format, credentials, attempt=max(attempt, 1), now=now)
        except Exception as error:
            unmade = f"the event cannot be made into a request ({type(error).__name__})"
            # A ValueError of ours holds nothing of the event; a library's may.
            return Refused(str(error) if type(error) is ValueError else unmade, attempt=Attempt("config_error"))
        if attempt:  # the lease of a row lasts for a look-up longer
            until += self._connector.lookup_seconds
        outcome = await self._client.post(made.headers, made.body, self._request_seconds, until)
        if isinstance(outcome, NoResponse) and outcome.code == "withdrawn":
            return LATE
        found = verdict(outcome, self._policy, partial(self._readable, made, credentials), time.time())
        if found is DELIVERED and isinstance(outcome, Response) and (self.delivery_details or attempt):
            return Delivered(outcome.status, outcome.seconds)
        return found

    def _readable(self, made: Request, credentials: Credentials, response: Response) -> str | None:
        signatures = made.signature.split(" ")
        secrets = {
            *self._url_secrets,
            *credentials.headers.values(),
            *(each.partition(",")[2] for each in signatures),
        }
        cut = not response.whole or len(response.prefix) >= PREFIX_BYTES
        return readable(response.prefix, secrets, made.body, personal=made.personal, cut=cut)

    async def reset(self) -> None:
        """Drop every connection."""
        self._connector.reset()

    async def check(self) -> str | None:
        """Connect, shake hands and listen for a while. Return the problem found, or None. Posts nothing."""
        if not signatures.active_keys(self._credentials.keys, time.time()):
            return ALL_ENDED
        try:
            await self._connector.check()
        except ExchangeFailed as error:
            return f"{error.code}: {error.reason}"
        return None

    async def close(self) -> None:
        """Drop every connection."""
        self._connector.reset()
