"""The addresses of one name: asked for in threads of its own, so that a dead name server delays nobody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import TypeAlias

from outbox_relay.sinks.webhook.trip import NotConnected

LOOKUP_SECONDS = 5.0
"""Longest wait for a lookup."""
KEPT_SECONDS = 2.0
"""How long addresses serve further connections. Whoever dials judges them again each time."""
FAILED_SECONDS = 5.0
"""How long a lookup that failed is not repeated."""
LOOKUPS = 2
"""Lookups under way at once, at most, those counted for which nobody waits any more."""
ADDRESSES = 1000
"""Addresses of a name, at most; more are refused, since all of them are judged."""

Found: TypeAlias = Sequence[str] | NotConnected


class Resolver:
    """Looks ``host`` up through the system's resolver, once for all who ask at the same time.

    A lookup blocks a thread for as long as the system likes. Its thread is no reason for the process to stay.
    """

    __slots__ = ("_flight", "_found", "_good_until", "_host", "_under_way")

    def __init__(self, host: str) -> None:
        self._host = host
        self._found: Found = ()
        self._good_until = 0.0
        self._flight: asyncio.Future[Found] | None = None
        self._under_way = 0

    async def addresses(self) -> Sequence[str]:
        """The addresses of the name, in the order of preference.

        Raises NotConnected: dns_error when there are none, dns_timeout when there was no word of it in time.
        """
        loop = asyncio.get_running_loop()
        found = self._found if loop.time() < self._good_until else await self._ask(loop)
        if isinstance(found, NotConnected):
            raise found.again()
        return found

    def forget(self) -> None:
        """Ask anew for the next connection."""
        self._good_until = 0.0
        self._flight = None

    async def _ask(self, loop: asyncio.AbstractEventLoop) -> Found:
        flight = self._flight or self._start(loop)
        if flight is None:
            return self._keep(loop, NotConnected("dns_timeout", "earlier lookups of the host's name have not returned"))
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await asyncio.shield(flight)
        except TimeoutError:
            late = NotConnected("dns_timeout", f"the host's name was not looked up within {LOOKUP_SECONDS:g} s")
            if self._flight is flight:
                self._flight = None
                self._keep(loop, late)
            return late

    def _start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Found] | None:
        if self._under_way >= LOOKUPS:
            return None
        self._under_way += 1
        self._flight = flight = loop.create_future()

        def returned(found: Found) -> None:
            self._under_way -= 1
            if self._flight is flight or not isinstance(found, NotConnected):
                self._keep(loop, found)
            if self._flight is flight:
                self._flight = None
            if not flight.done():
                flight.set_result(found)

        def look() -> None:
            found = _look_up(self._host)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(returned, found)

        Thread(target=look, name="lookup", daemon=True).start()
        return flight

    def _keep(self, loop: asyncio.AbstractEventLoop, found: Found) -> Found:
        self._found = found
        self._good_until = loop.time() + (FAILED_SECONDS if isinstance(found, NotConnected) else KEPT_SECONDS)
        return found


def _look_up(host: str) -> Found:
    """Blocks. Whatever goes wrong is a value: an exception would end the thread and leave who waits without a word."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = tuple(dict.fromkeys(str(address[0]) for _, _, _, _, address in entries))
    except socket.gaierror as error:
        return NotConnected("dns_error", f"the host's name has no address: {error.strerror or 'no reason given'}")
    except Exception as error:  # names that the system's codec refuses, answers that are none
        return NotConnected("dns_error", f"the host's name could not be looked up: {type(error).__name__}")
    if not found:
        return NotConnected("dns_error", "the host's name has no address")
    if len(found) > ADDRESSES:
        return NotConnected("dns_error", f"the host's name has more than {ADDRESSES:,} addresses")
    return found
