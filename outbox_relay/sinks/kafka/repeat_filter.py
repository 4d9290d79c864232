"""Suppression of repeated log lines: a client that cannot connect writes several per second. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

EVERY_SECONDS = 60.0
"""Minimum time between two lines that differ only in their numbers, and the period of ``MAX_LINES``."""
MAX_LINES = 20
"""Maximum number of lines per period."""
MAX_KINDS = 200
"""Maximum number of different lines remembered."""

_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class _Kind:
    due: float
    suppressed: int = 0


class RepeatFilter:
    """Selects the lines to write. ``now`` is a ``time.monotonic()`` value."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._period_ends = -math.inf
        self._written = 0
        self._suppressed = 0

    def __len__(self) -> int:
        """Return the number of different lines remembered."""
        return len(self._kinds)

    def filter(self, line: str, now: float) -> str | None:
        """Return ``line`` with the number of lines suppressed before it, or None to suppress it."""
        kind = self._kind(_NUMBERS.sub("#", line))
        if now < kind.due:
            kind.suppressed += 1
            return None
        if now >= self._period_ends:
            self._period_ends, self._written = now + EVERY_SECONDS, 0
        if self._written >= MAX_LINES:
            self._suppressed += 1
            return None
        self._written += 1
        similar, others = kind.suppressed, self._suppressed
        kind.due, kind.suppressed, self._suppressed = now + EVERY_SECONDS, 0, 0
        counts = [f"{similar} similar"] * bool(similar) + [f"{others} other"] * bool(others)
        return f"{line} ({' and '.join(counts)} lines suppressed before it)" if counts else line

    def _kind(self, text: str) -> _Kind:
        kind = self._kinds.get(text)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            kind = self._kinds[text] = _Kind(due=-math.inf)
        return kind
