"""The configuration of one sink as its session uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from outbox_relay.domain.attempts import RecordAttempts
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.retry import RetryPolicy
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits


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
    tenants take turns. ``record_attempts`` names the attempts that are recorded. With ``tenants`` the sink
    gets events with their tenants, which the log is asked for once more. With ``replay`` the
    events are those of a replay, and ``name`` is its internal name.

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
    tenants: bool = False
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
