"""The outcome of a request: a response, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus


@dataclass(frozen=True, slots=True)
class Response:
    """A complete status line and headers, whatever became of the body.

    ``headers`` are those that decide something or help a person (retry-after, date, location, webhook-delivery,
    content-type): lower-case names, values decoded as latin-1, repeated ones joined by ``", "``, clipped. ``prefix`` is
    the raw beginning of the body. ``timings`` are the seconds that dns, connect, tls and first_byte took, where they
    are known: a kept connection has first_byte only. ``whole`` is False when the body was cut, too slow, broken or
    longer than what is read.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    prefix: bytes = b""
    seconds: float = 0.0
    timings: tuple[tuple[str, float], ...] = ()
    whole: bool = True


@dataclass(frozen=True, slots=True)
class NoResponse:
    """A request without a response.

    ``code`` is one of dns_error, dns_timeout, connection_refused, connect_timeout, tls_error, ssrf_blocked,
    proxy_error, deadline, read_timeout, connection_reset, disconnected, protocol_error, withdrawn, internal,
    relay_exhausted.
    ``sent`` tells whether the destination may have processed the request: False only when nothing of it was sent, not
    even over a kept connection that was found closed. ``reason`` is a line for people: no URL, no address that a name
    resolves to, no secret.
    """

    code: str
    sent: bool
    reason: str
    seconds: float = 0.0
    timings: tuple[tuple[str, float], ...] = ()


def status_text(status: int) -> str:
    """Return ``status`` with the standard's phrase for it: that of the response may be any text."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
