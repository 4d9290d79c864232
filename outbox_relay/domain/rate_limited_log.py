"""Log lines at a limited rate."""

from __future__ import annotations

import time
from typing import Any

from structlog.stdlib import BoundLogger

INTERVAL_SECONDS = 10.0
"""Least time between two lines of one event that recurs, for example while the database is away."""


class RateLimitedLog:
    """A log that writes a recurring warning at most every ``INTERVAL_SECONDS``.

    The next line counts those left out in between.
    """

    def __init__(self, log: BoundLogger) -> None:
        self._log = log
        self._written: dict[str, tuple[float, int]] = {}

    def warning(self, event: str, /, **values: Any) -> None:
        """Write a line, or count it if one with the same ``event`` is recent.

        The number of different events must be small.
        """
        now = time.monotonic()
        written_at, left_out = self._written.get(event, (float("-inf"), 0))
        if now - written_at < INTERVAL_SECONDS:
            self._written[event] = (written_at, left_out + 1)
            return
        self._written[event] = (now, 0)
        more = {"left_out": left_out} if left_out else {}
        self._log.warning(event, **values, **more)
