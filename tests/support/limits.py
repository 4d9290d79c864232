"""Limits of sinks across all relays, for parts that are tested without a database."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from outbox_relay.relay.shared_limits import SharedLimits
from outbox_relay.relay.sink_leases import SinkLeases
from tests.support.logs import RecordedLog


def no_limits(leases: SinkLeases | None = None) -> SharedLimits:
    """Return the limits of a sink that has none."""
    nothing = cast("Any", None)
    return SharedLimits(nothing, UUID(int=1), leases or SinkLeases("s", 1), 15.0, RecordedLog())
