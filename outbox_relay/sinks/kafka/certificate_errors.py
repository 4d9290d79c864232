"""Find out why a broker's certificate was not accepted. The client does not say."""

from __future__ import annotations

import re
import socket
import ssl
from pathlib import Path

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.file_reading import FileReader
from outbox_relay.sinks.tls import trusting

CONNECT_SECONDS = 1.0
"""Timeout of the diagnostic connection."""

_UNVERIFIED = "certificate verify failed"
_ADDRESS = re.compile(r"ssl://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d+)/")


def with_certificate_error(reason: str, authorities: str | None, reader: FileReader) -> str:
    """Return ``reason``, preceded by the fault of the certificate if it is about one.

    ``reason`` is an error of the client, ``authorities`` the user's ``ssl.ca.location``, which ``reader`` opens. Blocks
    for at most two seconds more than that and sends no more than the beginning of a TLS handshake.
    """
    address = _ADDRESS.search(reason) if _UNVERIFIED in reason else None
    if address is None:
        return reason
    host, port = address[1].strip("[]"), int(address[2])
    fault = _fault(host, port, authorities, reader)
    return reason if fault is None else f"the certificate of {address[1]}:{port} is not accepted: {fault} ({reason})"


def _fault(host: str, port: int, authorities: str | None, reader: FileReader) -> str | None:
    try:
        context = reader.call(lambda: _context(authorities))
        with (
            socket.create_connection((host, port), CONNECT_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, ValueError, ConfigurationError):
        return None


def _context(authorities: str | None) -> ssl.SSLContext:
    if authorities is None or authorities == "probe":
        return trusting()
    if Path(authorities).is_dir():
        return trusting(directory=authorities)
    return trusting(authorities)
