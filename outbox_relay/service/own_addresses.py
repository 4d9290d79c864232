"""The addresses of the relay itself, to which no webhook is sent."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.postgres import dsn
from outbox_relay.settings import Settings

REFRESH_SECONDS = 60.0
"""Time between two lookups of the host names."""

Address = tuple[str, int]
"""A host, by name or address, and a port."""


class OwnAddresses:
    """Hosts and ports of the database and of the HTTP listener, with the addresses of the host names.

    An instance is a function that returns those known at the moment.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._listening: list[Address] = []
        self._known: frozenset[Address] = frozenset(self._configured())

    def __call__(self) -> Collection[Address]:
        """Return the known addresses."""
        return self._known

    def add(self, host: str, port: int) -> None:
        """Add the address at which the HTTP listener listens."""
        self._listening.append((host, port))
        self._known |= {(host, port)}

    def refresh(self) -> None:
        """Look up the host names once. A name that is not found keeps its last addresses.

        If the file of the connection string cannot be read, all do.
        """
        try:
            found = set(configured := self._configured())
        except ConfigurationError:
            return
        for host, port in configured:
            try:
                entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                found |= {known for known in self._known if known[1] == port}
            else:
                found |= {(str(address[0]), port) for *_, address in entries}
        self._known = frozenset(found)

    def _configured(self) -> list[Address]:
        listener = self._settings.http.address
        try:
            database = dsn.endpoints(self._settings.database.dsn(), os.environ)
        except ConfigurationError:
            database = []
        # The server itself, if dsn leads to a pooler.
        if (listen_dsn := self._settings.database.listen_dsn) is not None:
            database += dsn.endpoints(listen_dsn.get_secret_value(), os.environ)
        return [*database, *([listener] if listener else []), *self._listening]
