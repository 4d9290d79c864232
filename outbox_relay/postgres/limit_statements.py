"""Statements on the limits of sinks across all relays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from outbox_relay.domain.sink_limits import SinkLimits
from outbox_relay.postgres.database import Database


class Taken(NamedTuple):
    """Tokens that were taken, and what is left of them for all relays."""

    tokens: int
    remaining: float


class LimitStatements(Database):
    """Rates and slots of sinks. ``server`` as in ``LogStatements``."""

    async def state_limits(self, limits: Mapping[str, SinkLimits], server: str | None = None) -> dict[str, str]:
        """Put the limits of sinks in force on all relays. Return the reasons for those that are refused, by sink.

        The earlier limits of a sink then stay in force.
        """
        stated = {sink: each._asdict() for sink, each in limits.items()}
        return dict(await self._rows("state_limits", {"limits": json.dumps(stated), "server": server}))

    async def take_tokens(self, sink: str, wanted: int, unused: int, deadline: float) -> Taken | None:
        """Take up to ``wanted`` tokens of a sink's rate, and give ``unused`` back. None if it has no rate."""
        parameters = {"sink": sink, "wanted": wanted, "unused": unused}
        rows = await self._rows("take_tokens", parameters, deadline=deadline)
        return Taken(*rows[0]) if rows else None

    async def tend_slots(
        self, sink: str, relay: UUID, call: int, wanted: int, kept: int, lease_seconds: float, deadline: float
    ) -> tuple[int, int] | None:
        """Say how many slots of a sink ``relay`` wants; return how many it has from now on, and its fair share.

        It has at least ``kept`` of those that it had. ``call`` is above that of every earlier statement of this relay.
        None if the sink has no limit of requests in flight.
        """
        parameters = {
            "sink": sink,
            "relay": relay,
            "call": call,
            "wanted": wanted,
            "kept": kept,
            "lease": lease_seconds,
        }
        rows = await self._rows("tend_slots", parameters, deadline=deadline)
        return (rows[0][0], rows[0][1]) if rows else None
