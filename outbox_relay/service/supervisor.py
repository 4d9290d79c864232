"""Run the parts of a process, and start each again after errors that a service survives."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from structlog.stdlib import BoundLogger
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from outbox_relay.domain.errors import (
    DatabaseUnavailable,
    DatabaseUnusable,
    RelayError,
    Reloaded,
    SessionReset,
    StatementFailed,
)
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.domain.thread_shortage import is_thread_shortage
from outbox_relay.service.logs import reason

TRANSIENT = (DatabaseUnavailable, StatementFailed, SessionReset)
"""Errors after which a starting service tries again."""
SURVIVED = (*TRANSIENT, DatabaseUnusable)
"""Errors after which a running service starts the part again."""
PAUSE_SECONDS, PAUSE_MAX_SECONDS = 0.1, 2.0
"""Longest pause after the first error, doubled after each further one, and its limit. The pause itself is random."""
HEALTHY_SECONDS = 10.0
"""Running time of a part after which its earlier errors no longer count."""
OUT_OF_MEMORY_MAX = 5
"""Consecutive out-of-memory errors of a part after which the process gives up."""


class Supervisor:
    """Runs the parts of a process until ``stopping`` is set.

    ``reconnect`` is called after an error of the connection, before the pause.
    """

    def __init__(self, reconnect: Callable[[], Awaitable[None]], stopping: asyncio.Event, log: BoundLogger) -> None:
        self._reconnect = reconnect
        self._stopping = stopping
        self._log = log
        self._rate_limited_log = RateLimitedLog(log)
        self._exit_code = 0

    @property
    def exit_code(self) -> int:
        """The exit code of the process: 1 after a part gave up, otherwise 0."""
        return self._exit_code

    async def retry(self, event: str, step: Callable[[], Awaitable[None]]) -> None:
        """Run ``step`` until it succeeds. Log ``event`` after each of the errors ``TRANSIENT``, and raise others."""
        await self._retrying(event, _passes, lambda state: _pause(state.attempt_number))(step)

    async def supervise(self, name: str, part: Callable[[], Awaitable[None]], *, sink: str | None = None) -> None:
        """Run ``part`` until it returns. Start it again after each of the errors ``SURVIVED``, and raise others.
        It is started again, too, if there was no memory or no thread.

        ``sink`` is the sink that the part serves, if it is the session of one. The process gives up when the part has
        run out of memory ``OUT_OF_MEMORY_MAX`` times in a row.
        """
        errors = _Errors()

        async def run_once() -> None:
            started_at = time.monotonic()
            try:
                await part()
            except Exception as error:
                if not _survives(error):
                    raise
                errors.add(error, time.monotonic() - started_at)
                if self._is_over(name, errors):
                    return
                raise

        event, values = ("part.restarted", {"part": name}) if sink is None else ("sink.restarted", {"sink": sink})
        await self._retrying(event, _survives, lambda _: _pause(errors.in_a_row), **values)(run_once)

    def _is_over(self, name: str, errors: _Errors) -> bool:
        """Return True if the part is not to be started again. Give up if it cannot get memory."""
        if self._stopping.is_set():
            return True
        if errors.out_of_memory < OUT_OF_MEMORY_MAX:
            return False
        self._log.error("relay.gave_up", reason=f"{name} ran out of memory {errors.out_of_memory} times in a row")
        self._exit_code = 1
        self._stopping.set()
        return True

    def _retrying(
        self,
        event: str,
        again: Callable[[BaseException], bool],
        pause: Callable[[RetryCallState], float],
        **values: str,
    ) -> AsyncRetrying:
        async def before_pause(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, Reloaded):
                self._log.info("sink.reloaded", **values, reason=str(error))
                return
            self._rate_limited_log.warning(
                event,
                **values,
                reason=reason(error) if error else "",
                cause=error.reason if isinstance(error, RelayError) else None,
                again_in_seconds=round(state.upcoming_sleep, 2),
            )
            if isinstance(error, DatabaseUnavailable):
                await self._reconnect()

        return AsyncRetrying(retry=retry_if_exception(again), wait=pause, before_sleep=before_pause)


def _passes(error: BaseException) -> bool:
    """Return True if a step that raised ``error`` at the start is tried again."""
    return isinstance(error, TRANSIENT) or is_thread_shortage(error)


def _survives(error: BaseException) -> bool:
    """Return True if a part that raised ``error`` is started again."""
    return isinstance(error, (*SURVIVED, MemoryError)) or is_thread_shortage(error)


class _Errors:
    """The errors of one part since it last ran for ``HEALTHY_SECONDS``."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.out_of_memory = 0

    def add(self, error: Exception, ran_seconds: float) -> None:
        """Count ``error``, which ended the part after ``ran_seconds``."""
        if ran_seconds > HEALTHY_SECONDS:
            self.in_a_row = self.out_of_memory = 0
        self.in_a_row += 1
        self.out_of_memory = self.out_of_memory + 1 if isinstance(error, MemoryError) else 0


def _pause(errors: int) -> float:
    """Return a random pause, in seconds, after ``errors`` errors in a row."""
    doublings = min(errors - 1, 10)
    return random.uniform(0, min(PAUSE_MAX_SECONDS, PAUSE_SECONDS * 2**doublings))  # noqa: S311 - jitter is no secret
