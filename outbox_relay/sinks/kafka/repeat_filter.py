"""Log lines that repeat: a client that cannot connect writes several a second, for as long as that lasts. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

EVERY_SECONDS = 60.0
"""Time between two lines that differ only in their numbers, and the span in which ``LINES`` is counted."""
LINES = 20
"""Lines in that span, at most, whatever they say."""
KINDS = 200
"""Different lines remembered, at most."""

_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class _Kind:
    due: float
    left_out: int = 0


class RepeatFilter:
    """Says which lines to write. ``now`` is a ``time.monotonic()`` value."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._until = -math.inf
        self._written = 0
        self._left_out = 0

    def __len__(self) -> int:
        """How many different lines are remembered."""
        return len(self._kinds)

    def take(self, line: str, now: float) -> str | None:
        """Return ``line``, with the number of lines that were left out before it, or None to leave it out too."""
        kind = self._kind(_NUMBERS.sub("#", line))
        if now < kind.due:
            kind.left_out += 1
            return None
        if now >= self._until:
            self._until, self._written = now + EVERY_SECONDS, 0
        if self._written >= LINES:
            self._left_out += 1
            return None
        self._written += 1
        alike, others = kind.left_out, self._left_out
        kind.due, kind.left_out, self._left_out = now + EVERY_SECONDS, 0, 0
        said = [f"{alike} like it"] * bool(alike) + [f"{others} others"] * bool(others)
        return f"{line} ({' and '.join(said)} left out before it)" if said else line

    def _kind(self, text: str) -> _Kind:
        kind = self._kinds.get(text)
        if kind is None:
            if len(self._kinds) >= KINDS:
                del self._kinds[next(iter(self._kinds))]
            kind = self._kinds[text] = _Kind(due=-math.inf)
        return kind
