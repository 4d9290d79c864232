"""The addresses of one name, looked up in threads of its own: a dead name server delays no other sink."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import TypeAlias

from outbox_relay.sinks.webhook.connection import NotConnected

LOOKUP_SECONDS = 10.0
"""Longest wait for a lookup. A resolver asks the next name server after 5 s by default."""
KEPT_SECONDS = 2.0
"""Time for which addresses serve further connections. Each connection checks them again."""
FAILED_SECONDS = 5.0
"""Time for which a failed lookup is not repeated."""
ADDRESSES = 1000
"""Addresses of a name, at most; more are refused, since all of them are judged."""
Found: TypeAlias = Sequence[str] | NotConnected


class Resolver:
    """Looks ``host`` up through the system's resolver, once for all who ask at the same time.

    A lookup blocks a thread for as long as the system likes, but does not keep the process alive. Until it has
    returned there is no other.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._found: Found = ()
        self._good_until = 0.0
        self._lookup: asyncio.Future[None] | None = None

    async def addresses(self) -> Sequence[str]:
        """Return the addresses of the name, in the order of preference.

        Raises NotConnected: dns_error when there are none, dns_timeout when the lookup did not end in time.
        """
        loop = asyncio.get_running_loop()
        if loop.time() >= self._good_until:
            self._lookup = self._lookup or self._begin(loop)
            try:
                async with asyncio.timeout(LOOKUP_SECONDS):
                    await asyncio.shield(self._lookup)
            except TimeoutError:
                late = f"the host's name was not looked up within {LOOKUP_SECONDS:g} s"
                self._keep(loop, NotConnected("dns_timeout", late))
        if isinstance(self._found, NotConnected):  # one exception raised twice would collect the tracebacks of both
            raise NotConnected(self._found.code, self._found.reason)
        return self._found

    def forget(self) -> None:
        """Look the name up again for the next connection."""
        self._good_until = 0.0

    def _begin(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        lookup = loop.create_future()

        def look_up() -> None:
            found = _look_up(self._host)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(returned, found)

        def returned(found: Found) -> None:
            self._keep(loop, found)
            self._lookup = None
            lookup.set_result(None)

        Thread(target=look_up, name="lookup", daemon=True).start()
        return lookup

    def _keep(self, loop: asyncio.AbstractEventLoop, found: Found) -> None:
        self._found = found
        self._good_until = loop.time() + (FAILED_SECONDS if isinstance(found, NotConnected) else KEPT_SECONDS)


def _look_up(host: str) -> Found:
    """Return what the system's resolver finds. Blocks; every failure is a value, since this is the end of a thread."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = tuple(dict.fromkeys(str(address[0]) for _, _, _, _, address in entries))
    except Exception as error:  # also names that the system's codec refuses, and answers that are none
        known = isinstance(error, socket.gaierror) and error.strerror
        return NotConnected("dns_error", f"the host's name could not be looked up: {known or type(error).__name__}")
    if not found:
        return NotConnected("dns_error", "the host's name has no address")
    if len(found) > ADDRESSES:
        return NotConnected("dns_error", f"the host's name has more than {ADDRESSES:,} addresses")
    return found
