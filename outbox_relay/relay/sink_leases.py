"""The leases of one sink in this relay, and what the database says of the sink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from outbox_relay.domain.event import SHARDS

UNSERVED_RENEWALS = 4
"""How many renewals in a row, a third of a lease apart, must find a sink without a relay that serves it."""


class Lease(NamedTuple):
    """An owned shard: its epoch, when to stop by ``lease_clock()``, and the crashes counted at its claim."""

    epoch: int
    until: float
    crashes: int


@dataclass(slots=True)
class SinkLeases:
    """What this relay has of one sink. ``changed`` is called whenever any of it changes."""

    sink: str
    generation: int
    changed: Callable[[], None] = lambda: None
    held: dict[int, Lease] = field(default_factory=dict[int, Lease])
    serving: bool = True
    """False while the sink is paused, or served by relays with a newer configuration."""
    superseded: bool = False
    patterns: tuple[str, ...] = ()
    newest: int = 0
    """The sink's newest generation, and its patterns, as far as is known."""
    unserved: int = 0
    """At how many renewals in a row the sink was superseded here and no live relay served it."""
    behind: int = 0
    """At how many looks in a row the sink's generation was an earlier one than this relay's."""
    removed: bool = False
    """Whether the database does not know the sink any more."""
    fault: str | None = None
    """Why the shards that were claimed last cannot be served; None when they can."""
    excess: int = 0
    """How many shards to drain and release."""
    quota: int = SHARDS
    """How many shards are this relay's share."""
    unowned: int = 0
    """How many of its shards nobody owns, as far as is known."""
    circuit: str = "closed"
    """What the database says of the sink's circuit."""
    in_flight_limit: int | None = None
    """What it says of how many requests a relay may have under way; nothing: as many as the settings say."""
    doubtful_until: float = 0.0
    """Until when, by ``lease_clock()``, this relay may own shards that it does not know of: a claim had no answer."""
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while shards are claimed or claimed anew: the answers say what is held in the order in which they were asked
    for, or shards would be forgotten that are this relay's, and stand still for a lease."""

    def epochs(self, shards: Collection[int]) -> dict[int, int]:
        """shard → epoch of those of ``shards`` that are held."""
        return {shard: self.held[shard].epoch for shard in shards if shard in self.held}

    def until(self, shards: Collection[int]) -> float:
        """The ``lease_clock()`` value at which the first of ``shards`` must stop; 0.0 when one is not held."""
        return min((self.held[s].until if s in self.held else 0.0 for s in shards), default=0.0)

    @property
    def abandoned(self) -> bool:
        """Whether the relays that superseded this one have been gone for a lease."""
        return self.superseded and self.unserved >= UNSERVED_RENEWALS

    def leaving(self) -> set[int]:
        """The shards to drain now: all when this relay does not serve the sink, else the surplus."""
        if not self.serving:
            return set(self.held)
        return set(sorted(self.held)[len(self.held) - self.excess :]) if self.excess else set()
