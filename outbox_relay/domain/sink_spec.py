"""The configuration of one sink as its session uses it, and its limits across all relays. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, NamedTuple
from uuid import UUID

from outbox_relay.domain.attempts import RecordAttempts
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.outcomes import RetryPolicy


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


@dataclass(frozen=True, slots=True)
class ReplaySpec:
    """A replay that is delivered as a sink is.

    ``named`` is True if its events were named by their uids. ``rate`` is the limit in events per second across all
    relays, or None.
    """

    id: int
    named: bool = False
    rate: int | None = None


class SinkRoutes(NamedTuple):
    """The routes that a generation of a sink names: its event-type patterns, and its setting ``claim``."""

    patterns: tuple[str, ...]
    claim: str


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """The delivery rules of a sink. Times are in seconds.

    ``patterns`` are event-type patterns. ``types`` are the same as SQL LIKE patterns, or None if every type is routed
    except those of notices.
    ``ordered`` is ``order = "key"``, ``hold`` is ``when_dead = "hold"``, and ``start`` is the beginning of a sink that
    the database does not know. ``parked_max`` bounds the rows to be delivered, excluding scheduled events; at that
    bound the positions of the sink wait. With ``claim`` "rows", ``rows_max`` bounds them instead, and with ``fair``
    tenants take turns. ``record_attempts`` names the attempts that are recorded. With ``replay`` the events are those
    of a replay, and ``name`` is its internal name.

    ``limits`` are those of the file. In force are those of the database, where the newest configuration has written
    them: other limits do not make another specification.
    """

    name: str
    patterns: tuple[str, ...]
    types: tuple[str, ...] | None
    ordered: bool = True
    hold: bool = False
    start: str | None = None
    park_after_seconds: float = 1.0
    parked_max: int = 100_000
    claim: Literal["log", "rows"] = "log"
    rows_max: int = 10_000_000
    fair: bool = False
    record_attempts: RecordAttempts = "failures"
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    circuit: CircuitPolicy = field(default_factory=CircuitPolicy)
    replay: ReplaySpec | None = None
    limits: SinkLimits = field(default=NO_LIMITS, compare=False)

    @property
    def routes(self) -> SinkRoutes | None:
        """The routes of the sink; None for a replay, which has none."""
        return None if self.replay is not None else SinkRoutes(tuple(self.patterns), self.claim)

    @property
    def queued(self) -> bool:
        """True if every event becomes a row."""
        return self.claim == "rows"


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
