"""Limits of looks after failures: ticks then come without windows, or through the pool at a pace of their own."""

from __future__ import annotations

import asyncio
import time

from outbox_relay.postgres.rows import Look, WindowRequest

WINDOW_SECONDS = 4.0
"""Time that a tick with a window may take. If less counts as slow, ticks come without."""
SLOW_WINDOW_SECONDS = 0.1
"""Duration of a look above which windows are suspended."""
NO_WINDOW_SECONDS = 10.0
"""Time without windows after a look with one failed. Sessions then read in the usual way, which finds the reason."""
PAUSE_SECONDS, PAUSE_MAX_SECONDS = 1.0, 60.0
"""Time without looks after one without a window failed, doubled after each further failure, and its limit."""
POOL_PACE_SECONDS = 0.005
"""Time from one tick through the pool to the next, where no look sets the pace."""


class LookLimits:
    """The consequences of failed, slow and useless looks for the next ones.

    ``slow_seconds`` is the duration from which on a tick casts doubt on everything that was read before.
    """

    def __init__(self, slow_seconds: float) -> None:
        self._windows_fit = slow_seconds >= WINDOW_SECONDS
        self._no_window_until = float("-inf")
        self._no_look_until = float("-inf")
        self._failures = 0
        self._pool_due = float("-inf")

    @property
    def allow_look(self) -> bool:
        """True if the thread may be asked for a tick."""
        return time.monotonic() >= self._no_look_until

    @property
    def allow_window(self) -> bool:
        """True if a tick may come with a window. A tick that takes long would end every session."""
        return self._windows_fit and time.monotonic() >= self._no_window_until

    def answered(self, look: Look) -> None:
        """Take note of a look."""
        self._failures = 0
        if look.window is not None and (not look.window.usable or look.seconds[-1] > SLOW_WINDOW_SECONDS):
            self._suspend_windows()

    def failed(self, request: WindowRequest | None) -> None:
        """Take note of a look that failed, with the window of ``request`` or without one."""
        if request is not None:
            self._suspend_windows()
            return
        pause = min(PAUSE_MAX_SECONDS, PAUSE_SECONDS * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self._no_look_until = time.monotonic() + pause

    def _suspend_windows(self) -> None:
        self._no_window_until = time.monotonic() + NO_WINDOW_SECONDS

    async def wait_for_pool(self) -> None:
        """Wait until the next tick through the pool is due."""
        now = time.monotonic()
        if now < self._pool_due:
            await asyncio.sleep(self._pool_due - now)
        self._pool_due = time.monotonic() + POOL_PACE_SECONDS
