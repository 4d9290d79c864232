"""The ages up to which a relay counts as alive, and as well."""

ALIVE_SECONDS = 45.0
"""Maximum age of the heartbeat of a live relay: three default leases. A relay that owns a shard is also alive."""
STALE_SECONDS = 10.0
"""Age of the heartbeat from which a live relay is stale, unless half of a lease that it owns is left.

With the default lease, relays write it every 5 s. With a longer one they write it every third of the lease. Without
shards the lease is not known, and this age is 2.5 times as great.
"""
