"""The addresses of one name, looked up in threads of its own: a dead name server delays no other sink."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import TypeAlias

from outbox_relay.sinks.webhook.exchange import NotConnected, exhausted, exhausted_by

LOOKUP_SECONDS = 10.0
"""Longest wait for a lookup. A resolver asks the next name server after 5 s by default."""
KEPT_SECONDS = 2.0
"""Time for which addresses serve further connections. Each connection checks them again."""
FAILED_SECONDS = 5.0
"""Time for which a failed lookup is not repeated."""
LOOKUPS = 2
"""Lookups under way at once, at most, those included that timed out."""
ADDRESSES = 1000
"""Addresses of a name, at most; more are refused, since all of them are judged."""

Found: TypeAlias = Sequence[str] | NotConnected


class Resolver:
    """Looks ``host`` up through the system's resolver, once for all who ask at the same time.

    A lookup blocks a thread for as long as the system likes, but does not keep the process alive.
    """

    __slots__ = ("_found", "_good_until", "_host", "_lookup", "_under_way")

    def __init__(self, host: str) -> None:
        self._host = host
        self._found: Found = ()
        self._good_until = 0.0
        self._lookup: asyncio.Future[Found] | None = None
        self._under_way = 0

    async def addresses(self) -> Sequence[str]:
        """Return the addresses of the name, in the order of preference.

        Raises NotConnected: dns_error when there are none, dns_timeout when the lookup did not end in time.
        """
        loop = asyncio.get_running_loop()
        found = self._found if loop.time() < self._good_until else await self._ask(loop)
        if isinstance(found, NotConnected):  # one exception raised twice would collect the tracebacks of both
            raise NotConnected(found.code, found.reason)
        return found

    def forget(self) -> None:
        """Look the name up again for the next connection."""
        self._good_until = 0.0
        self._lookup = None

    async def _ask(self, loop: asyncio.AbstractEventLoop) -> Found:
        lookup = self._lookup or self._begin(loop)
        if lookup is None:
            return self._keep(loop, NotConnected("dns_timeout", "earlier lookups of the host's name have not returned"))
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await asyncio.shield(lookup)
        except TimeoutError:
            late = NotConnected("dns_timeout", f"the host's name was not looked up within {LOOKUP_SECONDS:g} s")
            if self._lookup is lookup:
                self._lookup = None
                self._keep(loop, late)
            return late

    def _begin(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Found] | None:
        if self._under_way >= LOOKUPS:
            return None
        self._under_way += 1
        self._lookup = lookup = loop.create_future()

        def look_up() -> None:
            found = _look_up(self._host)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._returned, lookup, found)

        try:
            Thread(target=look_up, name="lookup", daemon=True).start()
        except RuntimeError:
            self._returned(lookup, exhausted("no thread can be started to look up the host's name"))
        return lookup

    def _returned(self, lookup: asyncio.Future[Found], found: Found) -> None:
        self._under_way -= 1
        if self._lookup is lookup or not isinstance(found, NotConnected):
            self._keep(lookup.get_loop(), found)
        if self._lookup is lookup:
            self._lookup = None
        if not lookup.done():
            lookup.set_result(found)

    def _keep(self, loop: asyncio.AbstractEventLoop, found: Found) -> Found:
        self._found = found
        self._good_until = loop.time() + (FAILED_SECONDS if isinstance(found, NotConnected) else KEPT_SECONDS)
        return found


def _look_up(host: str) -> Found:
    """Return what the system's resolver finds. Blocks; every failure is a value, since this is the end of a thread."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = tuple(dict.fromkeys(str(address[0]) for _, _, _, _, address in entries))
    except socket.gaierror as error:
        return _no_descriptor() or NotConnected(
            "dns_error", f"the host's name has no address: {error.strerror or 'no reason given'}"
        )
    except Exception as error:  # names that the system's codec refuses, answers that are none
        return _no_descriptor() or NotConnected(
            "dns_error", f"the host's name could not be looked up: {type(error).__name__}"
        )
    if not found:
        return NotConnected("dns_error", "the host's name has no address")
    if len(found) > ADDRESSES:
        return NotConnected("dns_error", f"the host's name has more than {ADDRESSES:,} addresses")
    return found


def _no_descriptor() -> NotConnected | None:
    """Return the fault if no socket can be opened: the system's resolver may call that a failure of the name server."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    except OSError as error:
        return exhausted_by(error.errno)
    return None
