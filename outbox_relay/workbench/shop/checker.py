"""Checks the arrivals at one destination for lost, phantom, reordered and duplicate events. Pure.

The events of a key are numbered 1, 2, 3, … in the order in which their transactions committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

Identity = tuple[str, int, str]
"""Key, number within the key, uid. The uid is empty in checks that ignore it."""


@dataclass(frozen=True)
class CheckResult:
    """Numbers of events that were committed, arrived and violated the guarantees."""

    committed: int
    arrived: int
    """All arrivals, duplicates included."""
    lost: int
    phantom: int
    """Arrived without having been committed, for example after a rollback, or with another uid or key."""
    reordered: int
    """First arrivals after the first arrival of a later event of the same key."""
    duplicates: int

    @property
    def sound(self) -> bool:
        """Return True if nothing is lost or phantom and the first arrivals of every key are in order."""
        return not (self.lost or self.phantom or self.reordered)


class DeliveryChecker:
    """Checks the arrivals at one destination, given one by one."""

    def __init__(self) -> None:
        self._seen: Counter[Identity] = Counter()
        self._newest: dict[str, int] = {}
        self._reordered = 0

    @property
    def distinct(self) -> int:
        """Return the number of different events that arrived."""
        return len(self._seen)

    def add(self, key: str, number: int, uid: str = "") -> bool:
        """Add the next arrival. Return True if it is the first of its event."""
        event = (key, number, uid)
        self._seen[event] += 1
        if self._seen[event] > 1:
            return False
        self._reordered += number < self._newest.get(key, 0)
        self._newest[key] = max(number, self._newest.get(key, 0))
        return True

    def missing(self, committed: AbstractSet[Identity]) -> int:
        """Return the number of committed events that have not arrived yet."""
        return len(committed - self._seen.keys())

    def result(self, committed: AbstractSet[Identity]) -> CheckResult:
        """Compare the arrivals so far with the committed events."""
        return CheckResult(
            committed=len(committed),
            arrived=self._seen.total(),
            lost=self.missing(committed),
            phantom=len(self._seen.keys() - committed),
            reordered=self._reordered,
            duplicates=self._seen.total() - len(self._seen),
        )
