"""The judge of what arrived at one destination: what is missing, made up, out of order or there twice. Pure.

The events of a key carry the numbers 1, 2, 3, … in the order in which their transactions committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

Identity = tuple[str, int, str]
"""Key, number within the key, uid. Where uids play no part they are empty on both sides."""


@dataclass(frozen=True)
class CheckResult:
    """What arrived against what was committed, in events."""

    committed: int
    arrived: int
    """DeliveryChecker, repeated ones among them."""
    lost: int
    phantom: int
    """Made up: arrived and not committed, one that was rolled back for example, or under another uid or key."""
    reordered: int
    """First arrivals that came after the first arrival of a later event of their key."""
    duplicates: int

    @property
    def sound(self) -> bool:
        """Nothing lost, nothing made up, every key in order at first delivery."""
        return not (self.lost or self.phantom or self.reordered)


class DeliveryChecker:
    """The arrivals at one destination, told one after the other."""

    def __init__(self) -> None:
        self._seen: Counter[Identity] = Counter()
        self._newest: dict[str, int] = {}
        self._reordered = 0

    @property
    def distinct(self) -> int:
        """How many different events arrived."""
        return len(self._seen)

    def add(self, key: str, number: int, uid: str = "") -> bool:
        """One arrival, the next in the order in which the destination got them; was it the first of its event?"""
        event = (key, number, uid)
        self._seen[event] += 1
        if self._seen[event] > 1:
            return False
        self._reordered += number < self._newest.get(key, 0)
        self._newest[key] = max(number, self._newest.get(key, 0))
        return True

    def missing(self, committed: AbstractSet[Identity]) -> int:
        """How many committed events have not arrived yet."""
        return len(committed - self._seen.keys())

    def result(self, committed: AbstractSet[Identity]) -> CheckResult:
        """Judge what has arrived so far."""
        return CheckResult(
            committed=len(committed),
            arrived=self._seen.total(),
            lost=self.missing(committed),
            phantom=len(self._seen.keys() - committed),
            reordered=self._reordered,
            duplicates=self._seen.total() - len(self._seen),
        )
