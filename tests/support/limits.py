"""Limits of sinks across all relays, for parts that are tested without a database."""

from __future__ import annotations

from outbox_relay.relay.shared_limits import SharedLimits
from outbox_relay.relay.sink_leases import SinkLeases


def no_limits(leases: SinkLeases | None = None) -> SharedLimits:
    """Return the limits of a sink that has none."""
    return SharedLimits(leases or SinkLeases("s", 1))
