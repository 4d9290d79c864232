"""The time at which the next parked delivery is due."""

from __future__ import annotations

import asyncio
import time


class DueTimer:
    """The time of the next due delivery.

    It is shared by the code that parks events and the task that claims them.

    ``next_at`` is in seconds of ``time.monotonic()``, and infinite if no due time is known. One task waits.
    """

    def __init__(self) -> None:
        self.next_at = float("inf")
        self._event = asyncio.Event()

    def schedule_wakeup(self, seconds: float) -> None:
        """Record that a delivery is due in ``seconds``."""
        self.next_at = min(self.next_at, time.monotonic() + seconds)
        self._event.set()

    def wake(self) -> None:
        """End the wait early: deliveries may be due that have no due time of their own."""
        self._event.set()

    def forget(self, now: float) -> None:
        """Forget the due time if it is not after ``now``, when a claim begins."""
        if self.next_at <= now:
            self.next_at = float("inf")

    async def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for a due time or ``wake``."""
        self._event.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return
