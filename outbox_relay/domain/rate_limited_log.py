"""Log lines at a limited rate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from structlog.stdlib import BoundLogger

INTERVAL_SECONDS = 10.0
"""Least time between two lines of one event that recurs, for example while the database is away."""
SUBJECTS = ("sink", "part", "chore", "schedule", "group", "replay", "cause")
"""The values that tell lines of one event apart. The cause is the stable label of an error, not its text."""
MOST_LINES = 1_000
"""Number of lines that are counted apart. Further ones are limited by their event alone."""


class RateLimitedLog:
    """A log that writes a recurring warning at most every ``seconds``.

    The next line counts those left out in between.
    """

    def __init__(self, log: BoundLogger, seconds: float = INTERVAL_SECONDS) -> None:
        self._log = log
        self._seconds = seconds
        self._written: dict[tuple[object, ...], tuple[float, int]] = {}

    def warning(self, event: str, /, **values: Any) -> None:
        """Write a line, or count it if one with the same ``event`` and subject is recent.

        A second cause is written at once, even if a line of the first one is recent.
        """
        line = self._line(event, values)
        now = time.monotonic()
        written_at, left_out = self._written.get(line, (float("-inf"), 0))
        if now - written_at < self._seconds:
            self._written[line] = (written_at, left_out + 1)
            return
        self._written[line] = (now, 0)
        more = {"left_out": left_out} if left_out else {}
        self._log.warning(event, **values, **more)

    def _line(self, event: str, values: Mapping[str, Any]) -> tuple[object, ...]:
        line = (event, *(values.get(name) for name in SUBJECTS))
        return line if line in self._written or len(self._written) < MOST_LINES else (event,)
