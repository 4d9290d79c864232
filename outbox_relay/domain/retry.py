"""Delays between attempts: exponential backoff with jitter. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

MAX_DOUBLINGS = 62
"""Doublings of the base that still fit every configurable maximum."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The table ``retry`` of a sink: the delays before a failed event is tried again.

    The delay is ``base_seconds``·2ⁿ up to ``max_seconds``, ± the fraction ``jitter``.
    """

    attempts: Annotated[int, Ge(1), Le(10_000)] = 30
    """Attempts before an event is dead, 1 to 10000."""
    base_seconds: Annotated[float, Gt(0), Le(86_400)] = 1.0
    """Delay after the first failure, doubled after each further one, in seconds, above 0 and at most 86400."""
    max_seconds: Annotated[float, Gt(0), Le(604_800)] = 3600.0
    """Longest delay, also one that a destination asks for, in seconds, base_seconds to 604800."""
    jitter: Annotated[float, Ge(0), Le(1)] = 0.2
    """Part of a delay by which it is made shorter or longer at random, 0 to 1."""

    def delay_seconds(self, attempts: int, noise: float) -> float:
        """Return the delay after failure number ``attempts``, counted from 1.

        ``noise`` is drawn from [-1, 1].
        """
        doublings = min(attempts - 1, MAX_DOUBLINGS)
        return min(self.base_seconds * 2.0**doublings, self.max_seconds) * (1.0 + self.jitter * noise)


def requested_delay(seconds: float | None, policy: RetryPolicy, noise: float) -> float:
    """Return a requested delay, lengthened by jitter; 0.0 if none was requested."""
    return (seconds or 0.0) * (1.0 + policy.jitter * abs(noise))
