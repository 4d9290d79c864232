"""What one run of a scenario finds, and what several runs come to. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

EVENTS_PER_SECOND = "events/s"
TRANSACTIONS_PER_SECOND = "tps"
STATEMENTS_PER_SECOND = "statements/s"
MILLISECONDS = "ms"
MICROSECONDS = "us"
SECONDS = "s"
RATIO = "ratio"
BYTES_PER_EVENT = "bytes/event"
MEGABYTES = "MB"
PERCENT = "% of a core"
COUNT = "count"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of one run; `label` says of what, and is the same in every run."""

    label: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Summary:
    """One figure of all runs, in the order of the runs."""

    label: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one, or the mean of the two in the middle."""
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values)


def summarise(runs: Sequence[Sequence[Figure]]) -> list[Summary]:
    """The figures of all runs, by label and unit, in the order in which they first appear; a run may lack some."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for figure in run:
            found.setdefault((figure.label, figure.unit), []).append(figure.value)
    return [Summary(label, unit, tuple(values)) for (label, unit), values in found.items()]


def ratio(label: str, own: float, beside: float) -> Figure:
    """How many times `beside` the value `own` is; infinite beside nothing."""
    return Figure(label, own / beside if beside else math.inf, RATIO)


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: the smallest value that is not exceeded by that share of all. Raises ValueError for none."""
    if not values:
        raise ValueError("there is nothing to take a percentile of")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Progress:
    """How a count grew: when it was looked at, in seconds of one clock, and what it was."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, int]] = []

    def add(self, at: float, count: int) -> None:
        """One look; looks at nothing yet are left out but the last."""
        if len(self._looks) == 1 and not self._looks[0][1] and not count:
            self._looks.clear()
        self._looks.append((at, count))

    @property
    def count(self) -> int:
        """What the last look saw; 0 without any."""
        return self._looks[-1][1] if self._looks else 0

    def at(self, count: int) -> float:
        """When that many were first seen. Raises ValueError if they never were."""
        for when, seen in self._looks:
            if seen >= count:
                return when
        raise ValueError(f"never {count}: {self.count} at last")

    @property
    def per_second(self) -> float:
        """The growth from the first look that saw something to the first that saw the last count.

        A count that was there at one look altogether grew from the look before that one.
        """
        if not self.count:
            return 0.0
        end = self.at(self.count)
        first = next(look for look in self._looks if look[1])
        if first[0] == end:
            first = self._looks[0]
        return (self.count - first[1]) / (end - first[0]) if end > first[0] else math.inf
