"""What one relay knows of one sink: a value, made of the settings by ``app``."""

from __future__ import annotations

from dataclasses import dataclass, field

from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.outcomes import RetryPolicy


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """How a sink is to be served. Times in seconds.

    ``patterns`` are event-type patterns and ``types`` the same as SQL LIKE patterns, or nothing when every type
    is routed. ``ordered`` is ``order = "key"``, ``hold`` is ``when_dead = "hold"``, ``start`` where a sink that
    the database does not know begins. ``parked_max`` bounds the rows that are to be delivered,
    scheduled events left out: beyond it positions stand still.
    """

    name: str
    patterns: tuple[str, ...]
    types: tuple[str, ...] | None
    ordered: bool = True
    hold: bool = False
    start: str | None = None
    park_after_seconds: float = 1.0
    parked_max: int = 100_000
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    circuit: CircuitPolicy = field(default_factory=CircuitPolicy)
