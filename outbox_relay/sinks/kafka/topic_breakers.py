"""A small circuit breaker for each topic that accepts no events while the rest of the cluster does."""

from __future__ import annotations

import random
from dataclasses import dataclass

from outbox_relay.domain.outcomes import Unavailable

PROBE_SECONDS = 1.0
"""Time until the first probe of a topic, doubled after each failed probe."""
MAX_PROBE_SECONDS = 60.0
MAX_BREAKERS = 1_000
"""Maximum number of open breakers. Beyond it the oldest one is removed, and its topic is tried again."""


@dataclass(slots=True)
class _Breaker:
    reason: str
    next_probe: float
    delay: float
    probing: bool = False


class TopicBreakers:
    """The open breakers by topic. ``now`` is a ``time.monotonic()`` value."""

    def __init__(self) -> None:
        self._open: dict[str, _Breaker] = {}

    def __len__(self) -> int:
        """Return the number of open breakers."""
        return len(self._open)

    def __contains__(self, topic: object) -> bool:
        """Return True if the breaker of ``topic`` is open."""
        return topic in self._open

    def open(self, topic: str, reason: str, now: float) -> None:
        """Open the breaker of ``topic``. Each failed probe doubles the time until the next one."""
        known = self._open.get(topic)
        delay = PROBE_SECONDS
        if known is not None:
            # A record handed over before the breaker opened is no probe: its failure changes nothing.
            probed = known.probing or now >= known.next_probe
            delay = min(known.delay * 2, MAX_PROBE_SECONDS) if probed else known.delay
        elif len(self._open) >= MAX_BREAKERS:
            del self._open[next(iter(self._open))]
        self._open[topic] = _Breaker(reason, now + delay, delay)

    def may_request(self, topic: str, now: float) -> bool:
        """Return True if ``topic`` has no open breaker, or its next probe is due and none is in flight."""
        known = self._open.get(topic)
        return known is None or (now >= known.next_probe and not known.probing)

    def begin_probe(self, topic: str, now: float) -> bool:
        """Return True if an event of ``topic`` may be sent as its probe, one at a time.

        The probe ends with ``open``, ``close`` or ``cancel_probe``.
        """
        if topic not in self._open or not self.may_request(topic, now):
            return False
        self._open[topic].probing = True
        return True

    def close(self, topic: str) -> None:
        """Close the breaker of ``topic``, whose probe was delivered."""
        self._open.pop(topic, None)

    def cancel_probe(self, topic: str) -> None:
        """End the probe of ``topic`` without a result."""
        if topic in self._open:
            self._open[topic].probing = False

    def verdict(self, topic: str, now: float) -> Unavailable:
        """Return the verdict on an event of ``topic`` that is not sent.

        The event is to be retried some time after the next probe. That time is random, up to about the current delay,
        so that waiting events do not return all at once.
        """
        known = self._open[topic]
        seconds = max(known.next_probe - now, 0.0) + known.delay * (0.1 + random.random())  # noqa: S311 - spreads retries
        return Unavailable(known.reason, retry_after_seconds=round(seconds, 3), part=f"topic {topic}")
