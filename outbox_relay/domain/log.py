"""What the relay writes its log to: the part of a structured logger that it uses."""

from __future__ import annotations

import time
from typing import Any, Protocol

SELDOM_SECONDS = 10.0
"""Least time between two lines of one kind that come again and again, while the database is away say."""


class Log(Protocol):
    """A logger whose lines are an event and values. Never a payload, a header's value, a secret or a DSN."""

    def debug(self, event: str, /, **values: Any) -> Any:
        """For who looks closely."""
        ...

    def info(self, event: str, /, **values: Any) -> Any:
        """For who looks."""
        ...

    def warning(self, event: str, /, **values: Any) -> Any:
        """For who is asked to look."""
        ...


class Seldom:
    """A log that warns of one thing at most every ``seconds``; the next line counts those that were left out."""

    def __init__(self, log: Log, seconds: float = SELDOM_SECONDS) -> None:
        self._log = log
        self._seconds = seconds
        self._said: dict[str, tuple[float, int]] = {}

    def warning(self, event: str, /, **values: Any) -> None:
        """Write the line, or count it. ``event`` is what tells lines apart, so there are few."""
        now = time.monotonic()
        said_at, left_out = self._said.get(event, (float("-inf"), 0))
        if now - said_at < self._seconds:
            self._said[event] = (said_at, left_out + 1)
            return
        self._said[event] = (now, 0)
        more = {"left_out": left_out} if left_out else {}
        self._log.warning(event, **values, **more)
