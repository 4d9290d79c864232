"""The limits of a sink across all relays. Pure."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple
from uuid import UUID

from outbox_relay.domain.event import SHARDS


class SinkLimits(NamedTuple):
    """The limits of a sink across all relays, each None without one.

    ``rate_per_second`` is in events per second, and ``max_in_flight_total`` in requests. Scheduled events of one moment
    are spread over ``spread_seconds``.
    """

    rate_per_second: float | None = None
    max_in_flight_total: int | None = None
    spread_seconds: float | None = None


NO_LIMITS = SinkLimits()
BURST_SECONDS = 0.5
"""Time for which unused tokens of a rate are kept."""


def in_flight_share(total: int, shards: int, relays: int) -> int:
    """Return how many of ``total`` requests in flight the owner of ``shards`` may have, of ``relays`` that share them.

    Each owner has one, and its part of the others. The sum is at most ``total`` if there are no more relays than that.
    """
    return 1 + max(0, total - relays) * shards // SHARDS if shards else 0


class TokenBucket:
    """The tokens of a rate that may change: those of ``BURST_SECONDS``, and one more for a look that comes late."""

    def __init__(self, now: float) -> None:
        self._tokens = 0.0
        self._filled_at = now

    def fill(self, rate: float, now: float) -> int:
        """Add the tokens that ``rate`` has earned since the last call; return how many there are."""
        earned = rate * max(0.0, now - self._filled_at)
        self._tokens = min(1.0 + rate * BURST_SECONDS, self._tokens + earned)
        self._filled_at = now
        return max(0, int(self._tokens))

    def add(self, tokens: int) -> None:
        """Give tokens back, or take them (below 0)."""
        self._tokens += tokens


def spread_of(uid: str, spread_seconds: float) -> float:
    """Return by how many seconds an event is due later, as ``outbox_internal.spread_of`` computes it."""
    number = int.from_bytes(sha256(UUID(uid).bytes).digest()[:4], "big")
    return number % max(1, round(spread_seconds * 1000)) / 1000
