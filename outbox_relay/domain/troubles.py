"""The parts of a destination that are in trouble, such as topics, while the others accept events. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from outbox_relay.domain.outcomes import clip

MOST_TROUBLES = 1_000
"""Maximum number of parts that are remembered. Beyond it the one that was reported longest ago is forgotten."""
SHOWN = 5
"""Maximum number of parts whose reasons are shown."""


class Troubles:
    """The last reason of every part in trouble. ``now`` is in seconds of a monotonic clock."""

    __slots__ = ("_reported_at", "reasons")

    def __init__(self) -> None:
        self.reasons: Mapping[str, str] = {}
        """The reasons by part, in the order in which the troubles began. It is replaced and never changed."""
        self._reported_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.reasons)

    def report(self, part: str, reason: str, now: float) -> None:
        """Record that ``part`` is in trouble."""
        self._reported_at.pop(part, None)
        if len(self._reported_at) >= MOST_TROUBLES:
            self._remove({next(iter(self._reported_at))})
        self._reported_at[part] = now
        if self.reasons.get(part) != reason:
            self.reasons = {**self.reasons, part: reason}

    def forget(self, until: float) -> None:
        """Forget the parts that were last reported until then. Their events were delivered, or are dead."""
        self._remove({part for part, at in self._reported_at.items() if at <= until})

    def _remove(self, parts: set[str]) -> None:
        for part in parts:
            self._reported_at.pop(part, None)
        if parts:
            self.reasons = {part: reason for part, reason in self.reasons.items() if part not in parts}

    @property
    def text(self) -> str | None:
        """The reasons in one line, of at most ``SHOWN`` parts; None without trouble."""
        shown = list(self.reasons.values())[:SHOWN]
        more = f"; and {len(self) - SHOWN} more" if len(self) > SHOWN else ""
        return clip("; ".join(shown)) + more if shown else None
