"""The configuration of one sink as its loop uses it: its settings, with its name and its routes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from outbox_relay.domain.routing import SinkRoutes, like_patterns
from outbox_relay.domain.sink_limits import SinkLimits
from outbox_relay.sinks.settings import SinkSettings


@dataclass(frozen=True, slots=True)
class ReplaySpec:
    """A replay that is delivered as a sink is.

    ``named`` is True if its events were named by their uids. ``rate`` is the limit in events per second across all
    relays, or None.
    """

    id: int
    named: bool = False
    rate: int | None = None


PARK_AFTER_SECONDS = 1.0
"""Time for which an event in flight may delay its shard before it becomes a row."""


@dataclass(frozen=True)
class SinkSpec:
    """A sink: its name, the event-type patterns of its routes, and its settings.

    With ``replay`` the events are those of a replay, and ``name`` is its internal name.
    """

    name: str
    patterns: tuple[str, ...]
    settings: SinkSettings
    replay: ReplaySpec | None = None
    park_after_seconds: float = PARK_AFTER_SECONDS

    @cached_property
    def types(self) -> tuple[str, ...] | None:
        """The patterns as SQL LIKE patterns; None if every type is routed except those of notices."""
        return like_patterns(self.patterns)

    @property
    def routes(self) -> SinkRoutes | None:
        """The routes of the sink; None for a replay, which has none."""
        return None if self.replay is not None else SinkRoutes(self.patterns, self.settings.claim)

    @property
    def queued(self) -> bool:
        """True if every event becomes a row."""
        return self.settings.claim == "rows" and self.replay is None

    @property
    def ordered(self) -> bool:
        """True if events of a key keep their order."""
        return self.settings.order == "key"

    @property
    def hold(self) -> bool:
        """True if later events of a key wait for a person after a dead letter. A replay does not hold them up."""
        return self.settings.when_dead == "hold" and self.replay is None

    @property
    def fair(self) -> bool:
        """True if tenants take turns."""
        return self.settings.fair_by == "tenant"

    @property
    def limits(self) -> SinkLimits:
        """The limits in the settings. In force are those of the database, written by the newest configuration."""
        settings = self.settings
        return SinkLimits(
            settings.rate_per_second or None, settings.max_in_flight_total or None, settings.spread_seconds or None
        )
