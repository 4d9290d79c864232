"""Delays between attempts: exponential backoff with jitter. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DOUBLINGS = 62
"""Doublings of the base that still fit every configurable maximum."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A limit of attempts, and the backoff between them.

    The delay is ``base_seconds``·2ⁿ up to ``max_seconds``, ± the fraction ``jitter``.
    """

    attempts: int = 30
    base_seconds: float = 1.0
    max_seconds: float = 3600.0
    jitter: float = 0.2

    def delay_seconds(self, attempts: int, noise: float) -> float:
        """Return the delay after failure number ``attempts``, counted from 1.

        ``noise`` is drawn from [-1, 1].
        """
        doublings = min(attempts - 1, MAX_DOUBLINGS)
        return min(self.base_seconds * 2.0**doublings, self.max_seconds) * (1.0 + self.jitter * noise)


def requested_delay(seconds: float | None, policy: RetryPolicy, noise: float) -> float:
    """Return a requested delay, lengthened by jitter; 0.0 if none was requested."""
    return (seconds or 0.0) * (1.0 + policy.jitter * abs(noise))
