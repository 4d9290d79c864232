"""The age up to which a relay counts as alive."""

ALIVE_SECONDS = 45.0
"""Maximum age of the heartbeat of a live relay: three default leases. A relay that owns a shard is also alive."""
