"""The numbers of docs/reliability.md, derived from settings and from constants of the relay. Pure."""

from __future__ import annotations

from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.retry import RetryPolicy
from outbox_relay.relay.keeper import POLL_SECONDS
from outbox_relay.relay.loop import WAIT_SECONDS
from outbox_relay.relay.settle import FLUSH_SECONDS, MOST_EVENTS
from outbox_relay.relay.ticks import SLEEP_SECONDS
from outbox_relay.service.figures import LEASE_SECONDS, ROUND_SECONDS

DATABASE_SECONDS = 5.0
"""Time after a restart or a promotion of PostgreSQL in which events flow again."""
METRICS_SECONDS = LEASE_SECONDS + 2 * ROUND_SECONDS
"""Time in which metrics of the database show a recovery: another relay takes over the measuring, and two rounds."""
REPEATED_MOST = MOST_EVENTS
"""Maximum number of events in flight for a sink of one relay, and therefore repeated after its crash."""
IDLE_SECONDS = 60.0
"""Time in which a drill must become idle; there is no promise about the rate of a destination."""


def takeover_seconds(lease_seconds: float) -> float:
    """Return the time after the death of a relay in which events of every shard flow: the lease, and the next look."""
    return lease_seconds + POLL_SECONDS


def unsettled_seconds(park_after_seconds: float) -> float:
    """Return the time for which a delivered event may stay unsettled, and therefore be repeated after a crash."""
    return park_after_seconds + FLUSH_SECONDS


def delay_seconds(timeout_seconds: float) -> float:
    """Return the longest wait of an event whose destination answers: one poll, and one request that times out."""
    return SLEEP_SECONDS + timeout_seconds


def return_seconds(outage_seconds: float, policy: CircuitPolicy) -> float:
    """Return the time after the return of a destination in which the next probe is sent.

    Intervals double, so the current one is at most as long as the outage so far, and one more first interval.
    """
    return min(policy.probe_max_seconds, outage_seconds + policy.probe_seconds) + WAIT_SECONDS


def retry_seconds(attempts: int, policy: RetryPolicy) -> float:
    """Return the longest time until an event that has failed so often is tried again."""
    return policy.delay_seconds(max(attempts, 1), 1.0) + WAIT_SECONDS
