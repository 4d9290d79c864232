"""The HTTP client as the webhook sink sees it: one method, and a response or the lack of one."""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol, TypeAlias

Address: TypeAlias = tuple[str, int]
"""A host, by name or address, and a port."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A forward proxy, which looks destinations up and decides which of them are reached.

    ``authorization`` is the value of ``proxy-authorization``, if it wants one.
    """

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The target of a sink's requests. ``url`` has been checked with the settings, and is not shown.

    ``denied`` returns why an address is not dialled, or None; ``own`` returns the relay's own addresses and ports. With
    ``proxy`` it is looked up and dialled, and neither is asked: it alone learns what the host resolves to and judges
    that. ``tls`` is the context of https, which by default trusts the system's authorities.
    """

    url: str = field(repr=False)
    denied: Callable[[str], str | None]
    own: Callable[[], Collection[Address]] = tuple
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    proxy: Proxy | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A complete status line and headers, whatever became of the body.

    ``headers`` are those that decide something if an event is not delivered (retry-after, date, location,
    webhook-delivery): lower-case names, values decoded as latin-1, repeated ones joined by ``", "``, clipped.
    ``prefix`` is the raw beginning of the body. ``timings`` are the seconds that dns, connect, tls and first_byte took,
    where they are known: a kept connection has first_byte only. ``whole`` is False when the body was cut, too slow,
    broken or longer than what is read.
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
    proxy_error, deadline, read_timeout, connection_reset, disconnected, protocol_error, withdrawn, internal.
    ``sent`` tells whether the destination may have processed the request: False only when nothing of it was sent, not
    even over a kept connection that was found closed. ``reason`` is a line for people: no URL, no address that a name
    resolves to, no secret.
    """

    code: str
    sent: bool
    reason: str
    seconds: float = 0.0
    timings: tuple[tuple[str, float], ...] = ()


class HttpClient(Protocol):
    """Posts to one URL. The only implementation is ``PooledClient``: docs/decisions/own-http-client.md says why."""

    async def post(
        self, headers: Sequence[tuple[str, str]], body: bytes, seconds: float, until: float = math.inf
    ) -> Response | NoResponse:
        """Post ``body`` with ``headers`` within ``seconds``, the end of the response included, but no look-up.

        Nothing is sent from ``until`` on, a ``lease_clock()`` value: such a request is withdrawn. Raises for
        cancellation only.
        """
        ...


def status_text(status: int) -> str:
    """Return ``status`` with the standard's phrase for it: that of the response may be any text."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
