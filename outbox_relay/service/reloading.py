"""SIGHUP: the settings are read again, refused as a whole or kept until the database has confirmed them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from structlog.stdlib import BoundLogger

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.2
MOST_PAUSE_SECONDS = 5.0
"""Pauses before what was read is tried again: the first, doubled up to the longest."""
COMPLAIN_SECONDS = 10.0
"""Least time between two lines that a reload waits."""


class Reloading(Generic[T]):
    """Carries out what was asked for by ``ask``, one request after another; the newest one replaces those before.

    ``read`` returns the new configuration, checked so that nothing but the database can prevent it; what it raises
    refuses the request. ``adopt`` applies it, and returns a sentence when it is to be refused after all. What it raises
    means that it may or may not have been applied: it is called again, so it must be harmless twice.
    """

    def __init__(
        self, read: Callable[[], Awaitable[T]], adopt: Callable[[T], Awaitable[str | None]], log: BoundLogger
    ) -> None:
        self._read = read
        self._adopt = adopt
        self._log = log
        self._asked = asyncio.Event()
        self._pending: tuple[T] | None = None
        self._newest_refused = False
        self._pause = FIRST_PAUSE_SECONDS
        self._complained_at = float("-inf")
        self.last_successful = True
        """Whether the newest request was carried out; False while it waits. True before the first one."""

    def ask(self) -> None:
        """Reload as soon as possible."""
        self._asked.set()

    async def run(self) -> None:
        """Reload when asked, until cancelled. No exception of a reload gets out."""
        while True:
            await self._wait()
            if self._asked.is_set():
                self._asked.clear()
                await self._read_again()
            if self._pending is not None:
                await self._try(*self._pending)

    async def _wait(self) -> None:
        """Wait for a request, or until what is pending is to be tried again."""
        if self._pending is None:
            await self._asked.wait()
            return
        try:
            async with asyncio.timeout(self._pause * random.uniform(0.5, 1.0)):  # noqa: S311 - jitter is no secret
                await self._asked.wait()
        except TimeoutError:
            return

    async def _read_again(self) -> None:
        """Replace what is pending; a request that is refused leaves it as it is, since the database may know it."""
        try:
            self._pending = (await self._read(),)
            self._newest_refused = False
            self._pause = FIRST_PAUSE_SECONDS
            self._complained_at = float("-inf")
        except Exception as error:  # nothing that is wrong with a file may end the relay
            self._newest_refused = True
            self._refused(reason(error))

    async def _try(self, newer: T) -> None:
        try:
            refusal = await self._adopt(newer)
        except Exception as error:  # whether it was applied is unknown: it is tried again
            self._delayed(error)
            return
        self._pending = None
        if refusal is not None:
            self._refused(refusal)
            return
        self.last_successful = not self._newest_refused
        self._log.info("configuration reloaded")

    def _delayed(self, error: Exception) -> None:
        self.last_successful = False
        if time.monotonic() - self._complained_at >= COMPLAIN_SECONDS:
            self._complained_at = time.monotonic()
            self._log.warning("the configuration is not reloaded yet", reason=reason(error))
        self._pause = min(self._pause * 2, MOST_PAUSE_SECONDS)

    def _refused(self, why: str) -> None:
        self.last_successful = False
        self._log.error("the configuration was not reloaded; nothing has changed", reason=why)


def reason(error: BaseException) -> str:
    """Return what ``error`` says, or its class when it says nothing."""
    return str(error) or type(error).__name__
