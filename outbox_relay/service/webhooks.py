"""Build webhook sinks from their settings, and give them new secrets, headers and certificates at a reload."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.file_reading import sink_files
from outbox_relay.settings import Settings, WebhookSettings
from outbox_relay.sinks.webhook import Credentials, Endpoint, RequestFormat, ResponsePolicy, Tls, WebhookSink


class Renewal(NamedTuple):
    """The credentials of each sink by its name, and a TLS context for each set of certificate files."""

    credentials: Mapping[str, Credentials]
    contexts: Mapping[Tls, ssl.SSLContext]


class Webhooks:
    """The webhook sinks of one process, which share TLS contexts.

    Files and variables named by the settings are read here. ``own_addresses`` returns the hosts and ports of the relay
    itself, to which no webhook is sent.
    """

    def __init__(self, settings: Settings, own_addresses: Callable[[], Collection[tuple[str, int]]]) -> None:
        self._settings = settings
        self._own_addresses = own_addresses
        self._sinks: dict[str, WebhookSink] = {}
        self._contexts: dict[Tls, ssl.SSLContext] = {}

    def make(self, name: str) -> WebhookSink:
        """Return the sink ``name``, not yet open. Blocks while small files are read.

        Raises ``ConfigurationError``, with the place and without any secret, if a file or variable named by the
        settings cannot be used.
        """
        sink = self._sinks[name] = self._make(name)
        return sink

    def make_for_replay(self, name: str, replay: int, slots: int) -> WebhookSink:
        """Return a client of the sink ``name`` for a replay, with at most ``slots`` requests at once.

        It keeps its credentials. Blocks and raises as ``make``.
        """
        return self._make(name, replay, slots)

    def _make(self, name: str, replay: int | None = None, slots: int | None = None) -> WebhookSink:
        settings = dict(_webhooks(self._settings))[name]
        credentials = _credentials(self._settings, name, settings)
        context = self._context(name, _tls(settings))
        return WebhookSink(
            name,
            Endpoint(settings.url, settings.denied, self._own_addresses, context, settings.proxy_endpoint()),
            credentials,
            request_format=RequestFormat(
                settings.cloudevents, settings.cloudevents_source, frozenset(settings.forward_headers), replay
            ),
            policy=ResponsePolicy(
                frozenset(settings.accepted_statuses),
                frozenset(settings.permanent_statuses),
                settings.retry_after_max_seconds,
            ),
            timeout_seconds=settings.timeout_seconds,
            max_in_flight=slots or settings.max_in_flight,
            delivery_details=settings.record_attempts == "all",
        )

    def _context(self, name: str, tls: Tls) -> ssl.SSLContext:
        """Return the context for ``tls``, which sinks share because loading the system's authorities takes a while."""
        if tls not in self._contexts:
            self._contexts[tls] = _load(tls, self._settings, name)
        return self._contexts[tls]

    def replace(self, other: Webhooks, kept: Collection[str]) -> None:
        """Take over the settings of ``other``, and the sinks that it has made in place of those of their names.

        The sinks ``kept`` stay as they are.
        """
        ours = {name: self._settings.sinks[name] for name in kept}
        self._settings = other._settings.model_copy(update={"sinks": {**other._settings.sinks, **ours}})
        self._sinks.update((name, sink) for name, sink in other._sinks.items() if name not in kept)
        self._contexts.update(other._contexts)

    async def read(self, settings: Settings) -> Renewal:
        """Read what ``renew`` applies of ``settings``, and change no sink.

        Raises as ``make``.
        """
        contexts: dict[Tls, ssl.SSLContext] = {}
        credentials: dict[str, Credentials] = {}
        for name, sink in _webhooks(settings):
            reader, tls = sink_files(name), _tls(sink)
            if tls not in contexts:
                contexts[tls] = await reader.acall(partial(_load, tls, settings, name))
            credentials[name] = await reader.acall(partial(_credentials, settings, name, sink))
        return Renewal(credentials, contexts)

    def renew(self, renewal: Renewal, kept: Collection[str] = ()) -> None:
        """Use new secrets, headers, certificates and authorities, the system's too, from the next request on.

        No file is read, so this cannot fail. A sink keeps its certificate if its settings name other files than at
        start. The sinks ``kept`` stay as they are.
        """
        files = {name: _tls(sink) for name, sink in _webhooks(self._settings)}
        for name, credentials in renewal.credentials.items():
            if name not in kept:
                self._sinks[name].renew(credentials, renewal.contexts.get(files[name]))
        self._contexts.update((tls, new) for tls, new in renewal.contexts.items() if tls in self._contexts)


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


def _webhooks(settings: Settings) -> Iterator[tuple[str, WebhookSettings]]:
    return ((name, sink) for name, sink in settings.sinks.items() if isinstance(sink, WebhookSettings))


def _tls(settings: WebhookSettings) -> Tls:
    return Tls(settings.ca_file, settings.client_certificate, settings.client_key)


def _load(tls: Tls, settings: Settings, name: str) -> ssl.SSLContext:
    try:
        return tls.context()
    except ValueError as error:
        raise ConfigurationError(settings.at(("sinks", name), str(error))) from None


def _credentials(settings: Settings, name: str, sink: WebhookSettings) -> Credentials:
    try:
        return Credentials(sink.signing_keys(), sink.request_headers(os.environ), sink.proxy_authorization())
    except ConfigurationError as error:
        raise ConfigurationError(settings.at(("sinks", name), str(error))) from None
