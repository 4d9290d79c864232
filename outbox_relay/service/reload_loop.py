"""Reloads at SIGHUP: read new settings, and apply them until the database has confirmed or refused them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import RestartNeeded
from outbox_relay.service.logs import reason

T = TypeVar("T")

PAUSE_SECONDS, PAUSE_MAX_SECONDS = 0.2, 5.0
"""Longest pause before a configuration is applied again, doubled after each further try, and its limit."""
LOG_INTERVAL_SECONDS = 10.0
"""Least time between two log lines about a reload that waits."""


class ReloadLoop(Generic[T]):
    """Carries out requests for a reload, one after another. A new request replaces a pending one.

    ``read`` returns the new configuration, checked so that only the database can prevent it. An exception of ``read``
    refuses the request.

    ``apply`` applies the configuration, and returns the reason for refusing it, or None. After an exception it is
    unknown whether the configuration was applied. ``apply`` is then called again, so it must be idempotent.

    ``describe`` returns the fields of the log line about an applied configuration. ``note`` is called with the reason
    of a refused request, or None once one was carried out.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        apply: Callable[[T], Awaitable[str | None]],
        log: BoundLogger,
        describe: Callable[[T], Mapping[str, object]] = lambda _: {},
        note: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        self._read = read
        self._apply = apply
        self._describe = describe
        self._note = note
        self._log = log
        self._requested = asyncio.Event()
        self._pending: T | None = None
        self._newest_refused = False
        self._pause = PAUSE_SECONDS
        self._logged_at = float("-inf")
        self._last_successful = True

    @property
    def last_successful(self) -> bool:
        """True if the newest request was carried out, or none was made; False while it is pending."""
        return self._last_successful

    def request(self) -> None:
        """Reload as soon as possible."""
        self._requested.set()

    async def run(self) -> None:
        """Carry out requests until cancelled. No exception of a reload propagates."""
        while True:
            await self._wait()
            if self._requested.is_set():
                self._requested.clear()
                await self._read_new()
            if self._pending is not None:
                await self._try(self._pending)

    async def _wait(self) -> None:
        """Wait for a request, or until the pending configuration is to be tried again."""
        if self._pending is None:
            await self._requested.wait()
            return
        try:
            async with asyncio.timeout(self._pause * random.uniform(0.5, 1.0)):  # noqa: S311 - jitter is no secret
                await self._requested.wait()
        except TimeoutError:
            return

    async def _read_new(self) -> None:
        """Replace the pending configuration. A refused request leaves it, since the database may have it already."""
        try:
            self._pending = await self._read()
            self._newest_refused = False
            self._pause = PAUSE_SECONDS
            self._logged_at = float("-inf")
        except Exception as error:  # no error in a file may end the relay
            self._newest_refused = True
            self._log_refusal(reason(error), is_right=isinstance(error, RestartNeeded))

    async def _try(self, new: T) -> None:
        """Apply ``new``; it stays pending if that raises, since the database may have it."""
        try:
            refusal = await self._apply(new)
        except Exception as error:
            self._postpone(error)
            return
        self._pending = None
        if refusal is not None:
            self._log_refusal(refusal)
            return
        self._last_successful = not self._newest_refused
        if self._last_successful:
            self._note(None)
        self._log.info("config.reloaded", **self._describe(new))

    def _postpone(self, error: Exception) -> None:
        self._last_successful = False
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._logged_at = time.monotonic()
            self._log.warning("config.reload_pending", reason=reason(error))
        self._pause = min(self._pause * 2, PAUSE_MAX_SECONDS)

    def _log_refusal(self, why: str, *, is_right: bool = False) -> None:
        self._last_successful = False
        self._note(why)
        if is_right:
            self._log.warning("config.restart_needed", reason=why)
        else:
            self._log.error("config.reload_refused", reason=why)
