"""The limits of a sink across all relays. Pure."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple
from uuid import UUID


class SinkLimits(NamedTuple):
    """The limits of a sink across all relays, each None without one.

    ``rate_per_second`` is in events per second, and ``max_in_flight_total`` in requests. Scheduled events of one moment
    are spread over ``spread_seconds``.
    """

    rate_per_second: float | None = None
    max_in_flight_total: int | None = None
    spread_seconds: float | None = None


NO_LIMITS = SinkLimits()


def spread_of(uid: str, spread_seconds: float) -> float:
    """Return by how many seconds an event is due later, as ``outbox_internal.spread_of`` computes it."""
    number = int.from_bytes(sha256(UUID(uid).bytes).digest()[:4], "big")
    return number % max(1, round(spread_seconds * 1000)) / 1000
