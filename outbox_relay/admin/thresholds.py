"""Ages and waits from which status, doctor and the page call a relay, a sink or a schedule by another name."""

from __future__ import annotations

from typing import Final

ALIVE_SECONDS: Final = 45.0
"""Maximum age of the heartbeat of a live relay: three default leases. A relay that owns a shard is also alive."""
STALE_SECONDS: Final = 10.0
"""Age of the heartbeat from which a live relay is stale, unless half of a lease that it owns is left.

With the default lease, relays write it every 5 s. With a longer one they write it every third of the lease. Without
shards the lease is not known, and this age is 2.5 times as great.
"""
OLDEST_SECONDS: Final = 300.0
"""Age of the oldest unsettled event from which a sink counts as behind."""
LATE_SECONDS: Final = 60.0
"""Lateness of a schedule from which it is reported."""
