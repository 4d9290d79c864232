"""Pairs of neighbouring slots of one run, one with a feature and one without, and the cost of the feature in them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

RESAMPLES = 10_000
"""Number of samples of the pairs, drawn with replacement, of which the interval has 95 %."""


class Slot(NamedTuple):
    """The deliveries of a slot, its duration, and the processor time of the relay in it."""

    deliveries: int
    seconds: float
    processor: float

    @property
    def rate(self) -> float:
        """Return the deliveries per second."""
        return self.deliveries / self.seconds

    @property
    def each(self) -> float:
        """Return the processor time for a delivery."""
        return self.processor / self.deliveries


class Pair(NamedTuple):
    """Two neighbouring slots, and the answers that were rendered in the second."""

    without: Slot
    with_it: Slot
    answers: int

    @property
    def answer_ms(self) -> float:
        """Return the processor time for an answer: that of the deliveries in both slots is assumed to be equal."""
        return 1000 * self.with_it.deliveries * (self.with_it.each - self.without.each) / self.answers


class Estimate(NamedTuple):
    """A mean, and its interval of 95 %."""

    mean: float
    low: float
    high: float

    def over(self, times: float) -> list[float]:
        """Return mean, lower and upper bound for printing, divided by ``times``."""
        return [round(value / times, 2) for value in self]


def rate_cost(pairs: Sequence[Pair]) -> Estimate:
    """Estimate by how many percent the feature lowers the rate."""
    return _estimate([math.log(pair.without.rate / pair.with_it.rate) for pair in pairs], _percent)


def processor_cost(pairs: Sequence[Pair]) -> Estimate:
    """Estimate by how many percent the feature raises the processor time of the relay for a delivery."""
    return _estimate([math.log(pair.with_it.each / pair.without.each) for pair in pairs], _percent)


def answer_cost(pairs: Sequence[Pair]) -> Estimate:
    """Estimate the processor time of an answer in milliseconds."""
    return _estimate([pair.answer_ms for pair in pairs if pair.answers], float)


def _percent(logarithm: float) -> float:
    return 100 * math.expm1(logarithm)


def _estimate(values: Sequence[float], scale: Callable[[float], float]) -> Estimate:
    """Return the mean of at least two values, by bootstrap, in another scale."""
    drawn = random.Random(1)
    means = sorted(statistics.fmean(drawn.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = means[RESAMPLES // 40], means[-RESAMPLES // 40]
    return Estimate(scale(statistics.fmean(values)), scale(low), scale(high))
