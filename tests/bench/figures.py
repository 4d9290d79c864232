"""Figures of one run of a scenario and summaries of several runs. Pure."""

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
    """One measured value; its `label` is the same in every run."""

    label: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The values of one figure in all runs, in order."""

    label: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        """Return the smallest value."""
        return min(self.values)

    @property
    def most(self) -> float:
        """Return the largest value."""
        return max(self.values)


def summarise(runs: Sequence[Sequence[Figure]]) -> list[Summary]:
    """Group the figures of all runs by label and unit, in order of first appearance."""
    values: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for figure in run:
            values.setdefault((figure.label, figure.unit), []).append(figure.value)
    return [Summary(label, unit, tuple(of_all)) for (label, unit), of_all in values.items()]


def ratio(label: str, value: float, reference: float) -> Figure:
    """Return the ratio of `value` to `reference`, infinite if `reference` is 0."""
    return Figure(label, value / reference if reference else math.inf, RATIO)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile by nearest rank; `share` is between 0 and 1. Raise ValueError without values."""
    if not values:
        raise ValueError("no values to take a percentile of")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Progress:
    """The growth of a count, as samples of time in seconds and value."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []

    def add(self, at: float, count: int) -> None:
        """Add a sample. Of the initial samples of 0, only the last is kept."""
        if len(self._samples) == 1 and not self._samples[0][1] and not count:
            self._samples.clear()
        self._samples.append((at, count))

    @property
    def count(self) -> int:
        """Return the last value, 0 without samples."""
        return self._samples[-1][1] if self._samples else 0

    def reached_at(self, count: int) -> float:
        """Return the time of the first sample with at least `count`. Raise ValueError if there is none."""
        for when, seen in self._samples:
            if seen >= count:
                return when
        raise ValueError(f"{count} was never reached: the last value is {self.count}")

    @property
    def per_second(self) -> float:
        """Return the growth rate from the first non-zero sample to the first one with the last value.

        If these are the same sample, the growth is measured from the sample before.
        """
        if not self.count:
            return 0.0
        end = self.reached_at(self.count)
        first = next(sample for sample in self._samples if sample[1])
        if first[0] == end:
            first = self._samples[0]
        return (self.count - first[1]) / (end - first[0]) if end > first[0] else math.inf
