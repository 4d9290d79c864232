"""The addresses of one host: looked up in a thread of its own, and every one of them judged before one is dialled."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from ipaddress import ip_address
from threading import Thread
from typing import TypeAlias

from outbox_relay.sinks.webhook.connection import ExchangeFailed
from outbox_relay.sinks.webhook.http_client import Address

LOOKUP_SECONDS = 10.0
"""Longest wait for a lookup. A resolver asks the next name server after 5 s by default."""
KEPT_SECONDS = 2.0
"""Time for which the outcome of a lookup serves further connections. Each connection judges its addresses again."""
Found: TypeAlias = Sequence[str] | ExchangeFailed


class Resolver:
    """Looks ``host`` up through the system's resolver, once for all who ask at the same time.

    A lookup blocks a thread for as long as the system likes, but does not keep the process alive. Until it has
    returned there is no other, so that a dead name server costs one thread and delays no other sink.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._lookup: asyncio.Future[tuple[Found, float]] | None = None
        """The lookup under way, or the last one with the time until which it is good."""

    async def addresses(self) -> Sequence[str]:
        """Return the addresses, in the order of preference. Raises ExchangeFailed: dns_error, dns_timeout, internal."""
        lookup = self._lookup
        if lookup is None or (lookup.done() and lookup.result()[1] <= time.monotonic()):
            lookup = self._lookup = self._begin()
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                found, _ = await asyncio.shield(lookup)
        except TimeoutError:
            raise ExchangeFailed("dns_timeout", f"no name server answered within {LOOKUP_SECONDS:g} s") from None
        if isinstance(found, ExchangeFailed):  # one exception raised twice would collect the tracebacks of both
            raise ExchangeFailed(found.code, found.reason)
        return found

    def forget(self) -> None:
        """Look the name up again for the next connection."""
        if self._lookup is not None and self._lookup.done():
            self._lookup = None

    def _begin(self) -> asyncio.Future[tuple[Found, float]]:
        loop = asyncio.get_running_loop()
        lookup: asyncio.Future[tuple[Found, float]] = loop.create_future()

        def look_up() -> None:
            found = _look_up(self._host)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lookup.set_result, (found, time.monotonic() + KEPT_SECONDS))

        Thread(target=look_up, name="lookup", daemon=True).start()
        return lookup


def _look_up(host: str) -> Found:
    """Return what the system's resolver finds. Blocks; every failure is a value, since this is the end of a thread."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = tuple(dict.fromkeys(str(address[0]) for _, _, _, _, address in entries))
    except Exception as error:  # also names that the system's codec refuses, and answers that are none
        try:
            socket.socket().close()
        except OSError as own:  # the resolver had no socket either, and reports that as a failure of the name
            return ExchangeFailed("internal", f"this machine cannot look names up: {own.strerror}")
        known = isinstance(error, socket.gaierror) and error.strerror
        return ExchangeFailed("dns_error", f"the host's name could not be looked up: {known or type(error).__name__}")
    return found or ExchangeFailed("dns_error", "the host's name has no address")


def judge(addresses: Sequence[str], port: int, denied: Callable[[str], str | None], own: Collection[Address]) -> None:
    """Raise ExchangeFailed unless every one of ``addresses`` may be dialled, for the reasons of ``Endpoint``.

    The reason names a kind and no address: it reaches people who must not learn what a name resolves to inside.
    """
    here = {plain_address(host) for host, own_port in own if own_port == port}
    everywhere = not here.isdisjoint(("0.0.0.0", "::"))  # noqa: S104 - such a listener has every address of the machine
    kinds: set[str] = set()
    for address in addresses:
        if (plain := plain_address(address)) is None:
            raise ExchangeFailed("dns_error", "the host's name resolves to something that is no address")
        if kind := denied(address):
            kinds.add(kind)
        elif plain in here or (everywhere and _is_here(plain)):
            kinds.add("the relay's own")
    if kinds:
        raise ExchangeFailed("ssrf_blocked", f"the host has an address that is not dialled: {min(kinds)}")


def plain_address(host: str) -> str | None:
    """Return one spelling of an address, that of the IPv4 address in a mapped one, or None for a name."""
    try:
        parsed = ip_address(host)
    except ValueError:
        return None
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def _is_here(address: str) -> bool:
    """Return whether ``address`` is one of this machine's: only those can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return ip_address(address).is_unspecified
    return True
