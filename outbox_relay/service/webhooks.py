"""Webhook sinks out of their settings: made at start, given new secrets and headers at SIGHUP, kept off the relay."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.postgres import dsn
from outbox_relay.settings import Settings, WebhookSettings
from outbox_relay.sinks.webhook import Credentials, Endpoint, RequestFormat, ResponsePolicy, Tls, WebhookSink

OWN_SECONDS = 60.0
"""How often the name of the database is looked up for where webhooks must not go."""


class Renewal(NamedTuple):
    """New secrets and headers by the sinks' names, and a new context for each set of files of certificates."""

    credentials: Mapping[str, Credentials]
    contexts: Mapping[Tls, ssl.SSLContext]


class Webhooks:
    """The webhook sinks of one process. What their settings name, files and variables, is read here."""

    def __init__(self, settings: Settings) -> None:
        self.own = OwnAddresses(settings)
        self._settings = settings
        self._sinks: dict[str, WebhookSink] = {}
        self._contexts: dict[Tls, ssl.SSLContext] = {}

    def make(self, name: str) -> WebhookSink:
        """The sink of that name. Blocks for as long as reading small files takes.

        Raises ConfigurationError, with the place and without any secret, when something that the settings name cannot
        be used.
        """
        settings = dict(_webhooks(self._settings))[name]
        credentials = _credentials(self._settings, name, settings)
        sink = self._sinks[name] = WebhookSink(
            name,
            Endpoint(
                settings.url, settings.denied, self.own, self._context(name, _tls(settings)), settings.proxy_endpoint()
            ),
            credentials,
            request_format=RequestFormat(
                settings.cloudevents, settings.cloudevents_source, frozenset(settings.forward_headers)
            ),
            policy=ResponsePolicy(frozenset(settings.permanent_statuses), settings.retry_after_max_seconds),
            timeout_seconds=settings.timeout_seconds,
            max_in_flight=settings.max_in_flight,
        )
        return sink

    def _context(self, name: str, tls: Tls) -> ssl.SSLContext:
        """One context for all sinks with the same files: reading the system's authorities takes a while."""
        if tls not in self._contexts:
            try:
                self._contexts[tls] = tls.context()
            except ValueError as error:
                raise ConfigurationError(self._settings.at(("sinks", name), str(error))) from None
        return self._contexts[tls]

    def read(self, settings: Settings) -> Renewal:
        """Read everything that ``renew`` applies of ``settings``; change nothing.

        Blocks and raises as ``make``.
        """
        contexts: dict[Tls, ssl.SSLContext] = {}
        for name, sink in _webhooks(settings):
            try:
                if (tls := _tls(sink)) != Tls() and tls not in contexts:
                    contexts[tls] = tls.context()
            except ValueError as error:
                raise ConfigurationError(settings.at(("sinks", name), str(error))) from None
        credentials = {name: _credentials(settings, name, sink) for name, sink in _webhooks(settings)}
        return Renewal(credentials, contexts)

    def renew(self, renewal: Renewal) -> None:
        """Use secrets and headers from the next request on, certificates and authorities from the next connection.

        Reads nothing, so it cannot fail. A sink whose settings name other files than at its start keeps its
        certificate.
        """
        files = {name: _tls(sink) for name, sink in _webhooks(self._settings)}
        for name, credentials in renewal.credentials.items():
            self._sinks[name].renew(credentials, renewal.contexts.get(files[name]))
        self._contexts.update((tls, new) for tls, new in renewal.contexts.items() if tls in self._contexts)


def unreadable(settings: Settings) -> list[str]:
    """What the settings of webhooks name and cannot be used here, a line each with its place, without any secret."""
    problems: list[str] = []
    for name, sink in _webhooks(settings):
        try:
            _credentials(settings, name, sink)
            if (tls := _tls(sink)) != Tls():
                tls.context()
        except ConfigurationError as error:
            problems.append(str(error))
        except ValueError as error:
            problems.append(settings.at(("sinks", name), str(error)))
    return problems


def _webhooks(settings: Settings) -> Iterator[tuple[str, WebhookSettings]]:
    return ((name, sink) for name, sink in settings.sinks.items() if isinstance(sink, WebhookSettings))


def _tls(settings: WebhookSettings) -> Tls:
    return Tls(settings.ca_file, settings.client_certificate, settings.client_key)


def _credentials(settings: Settings, name: str, sink: WebhookSettings) -> Credentials:
    try:
        return Credentials(sink.signing_keys(), sink.request_headers(os.environ), sink.proxy_authorization())
    except ConfigurationError as error:
        raise ConfigurationError(settings.at(("sinks", name), str(error))) from None


class OwnAddresses:
    """Hosts and ports of the relay itself: those of the settings, and the addresses that the names among them have."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._listening: list[tuple[str, int]] = []
        self._known: frozenset[tuple[str, int]] = frozenset(self._named())

    def __call__(self) -> Collection[tuple[str, int]]:
        """What is known by now."""
        return self._known

    def add(self, host: str, port: int) -> None:
        """The relay listens there."""
        self._listening.append((host, port))
        self._known |= {(host, port)}

    async def run(self) -> None:
        """Look the names up again and again, until cancelled; a name that is not found keeps its last addresses."""
        while True:
            await self.refresh()
            await asyncio.sleep(OWN_SECONDS)

    async def refresh(self) -> None:
        """Look the names up once, in a thread."""
        self._known = await asyncio.to_thread(self._found)

    def _found(self) -> frozenset[tuple[str, int]]:
        named = self._named()
        found = set(named)
        for host, port in named:
            try:
                entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                found |= {known for known in self._known if known[1] == port}
            else:
                found |= {(str(address[0]), port) for *_, address in entries}
        return frozenset(found)

    def _named(self) -> list[tuple[str, int]]:
        address = self._settings.http.address
        try:
            database = dsn.endpoints(self._settings.database.dsn(), os.environ)
        except ConfigurationError:
            database = []
        return [*database, *([address] if address else []), *self._listening]
