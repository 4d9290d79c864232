"""Build webhook sinks from their settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Iterator

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.settings import Settings, WebhookSettings
from outbox_relay.settings.problems import dotted
from outbox_relay.sinks.posting import PostingSink
from outbox_relay.sinks.tls import system_authorities
from outbox_relay.sinks.webhook import Credentials, Endpoint, Proxy, RequestFormat, ResponsePolicy, Tls, WebhookSink


class Webhooks:
    """Makes the webhook sinks of one process, or of one reload, which share TLS contexts.

    Files and variables named by the settings are read here. ``own_addresses`` returns the hosts and ports of the relay
    itself, to which no webhook is sent.
    """

    def __init__(self, settings: Settings, own_addresses: Callable[[], Collection[tuple[str, int]]]) -> None:
        self._settings = settings
        self._own_addresses = own_addresses
        self._contexts: dict[Tls, ssl.SSLContext] = {}

    def make(self, name: str, replay: int | None = None, slots: int | None = None) -> PostingSink:
        """Return the sink ``name``, or one like it for a ``replay`` with at most ``slots`` requests at once.

        It is not yet open. Blocks while small files are read. Raises ``ConfigurationError``, with the place and without
        any secret, if a file or variable named by the settings cannot be used.
        """
        settings = dict(_webhooks(self._settings))[name]
        credentials, proxy = _credentials(self._settings, name, settings)
        context = self._context(name, _tls(settings))
        client = WebhookSink(
            name,
            Endpoint(settings.url, settings.denied, self._own_addresses, context, proxy),
            credentials,
            request_format=RequestFormat(
                settings.cloudevents, settings.cloudevents_source, frozenset(settings.forward_headers), replay
            ),
            policy=ResponsePolicy(
                frozenset(settings.accepted_statuses),
                frozenset(settings.permanent_statuses),
                settings.retry.max_seconds,
            ),
            timeout_seconds=settings.timeout_seconds,
            max_in_flight=slots or settings.max_in_flight,
            delivery_details=settings.record_attempts == "all",
        )
        return PostingSink(client)

    def _context(self, name: str, tls: Tls) -> ssl.SSLContext:
        """Return the context for ``tls``, which sinks share because loading the system's authorities takes a while."""
        if tls not in self._contexts:
            self._contexts[tls] = _load(tls, self._settings, name)
        return self._contexts[tls]


def unreadable(settings: Settings) -> list[str]:
    """Return a line, without any secret, for each file or variable that webhooks name and that cannot be used here."""
    problems: list[str] = []
    for name, sink in _webhooks(settings):
        try:
            _credentials(settings, name, sink)
            if (tls := _tls(sink)) != Tls():
                _load(tls, settings, name)
        except ConfigurationError as error:
            problems.append(str(error))
    return problems


def system_contents(settings: Settings) -> dict[str, int]:
    """Return a number that changes with the system's authorities for each sink that trusts them, by its setting."""
    trusting = [name for name, sink in _webhooks(settings) if sink.ca_file is None and sink.url.startswith("https:")]
    if not trusting:
        return {}
    try:
        number = system_authorities()
    except (ConfigurationError, OSError):
        number = 0  # who reads the file says why
    return {dotted(("sinks", name, "ca_file")): number for name in trusting}


def _webhooks(settings: Settings) -> Iterator[tuple[str, WebhookSettings]]:
    return ((name, sink) for name, sink in settings.sinks.items() if isinstance(sink, WebhookSettings))


def _tls(settings: WebhookSettings) -> Tls:
    return Tls(settings.ca_file, settings.client_certificate, settings.client_key)


def _load(tls: Tls, settings: Settings, name: str) -> ssl.SSLContext:
    try:
        return tls.context()
    except ValueError as error:
        raise ConfigurationError(settings.at(("sinks", name), str(error))) from None


def _credentials(settings: Settings, name: str, sink: WebhookSettings) -> tuple[Credentials, Proxy | None]:
    try:
        endpoint, authorization = sink.proxy_endpoint(), sink.proxy_authorization()
        proxy = None if endpoint is None else Proxy(*endpoint, authorization)
        return Credentials(sink.signing_keys(), sink.request_headers()), proxy
    except ConfigurationError as error:
        raise ConfigurationError(settings.at(("sinks", name), str(error))) from None
