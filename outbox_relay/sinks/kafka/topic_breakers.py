"""Topics that take no events while the rest of the cluster does: a small circuit for each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from outbox_relay.domain.outcomes import Unavailable

PROBE_SECONDS = 1.0
"""Time to the first probe of a topic, doubled after each further one."""
PROBE_MOST_SECONDS = 60.0
TOPICS = 1_000
"""Topics kept at once, at most: the one that failed first is asked again then."""


@dataclass(slots=True)
class _Trouble:
    reason: str
    until: float
    """When the next probe is due; the clock is ``time.monotonic()``."""
    delay: float
    probing: bool = False


class TopicBreakers:
    """What is known of topics in trouble. ``now`` is a ``time.monotonic()`` value, ``noise`` draws from [0, 1)."""

    def __init__(self, noise: Callable[[], float] = random.random) -> None:
        self._noise = noise
        self._of: dict[str, _Trouble] = {}

    def __len__(self) -> int:
        """How many topics there are."""
        return len(self._of)

    def __contains__(self, topic: object) -> bool:
        """Whether ``topic`` is in trouble."""
        return topic in self._of

    def note(self, topic: str, reason: str, now: float) -> None:
        """``topic`` takes no events; each time that is found out again, the next probe is further away."""
        known = self._of.get(topic)
        delay = PROBE_SECONDS
        if known is not None:
            # What was handed over before the trouble was known is no probe, and says nothing new.
            probed = known.probing or now >= known.until
            delay = min(known.delay * 2, PROBE_MOST_SECONDS) if probed else known.delay
        elif len(self._of) >= TOPICS:
            del self._of[next(iter(self._of))]
        self._of[topic] = _Trouble(reason, now + delay, delay)

    def due(self, topic: str, now: float) -> bool:
        """Whether ``topic`` may be asked about: it is in no trouble, or its next probe is due and none is under way."""
        known = self._of.get(topic)
        return known is None or (now >= known.until and not known.probing)

    def probe(self, topic: str, now: float) -> bool:
        """Whether an event of ``topic`` may be sent as its probe; one at a time, which ends by one of the next two."""
        if topic not in self._of or not self.due(topic, now):
            return False
        self._of[topic].probing = True
        return True

    def mended(self, topic: str) -> None:
        """The probe was delivered."""
        self._of.pop(topic, None)

    def unused(self, topic: str) -> None:
        """The probe told nothing of the topic."""
        if topic in self._of:
            self._of[topic].probing = False

    def verdict(self, topic: str, now: float) -> Unavailable:
        """The verdict on an event of ``topic`` that is not sent: to come again some time after the next probe.

        That time is drawn at random, as long as the distance of the probes: whatever waits does not come at once.
        """
        known = self._of[topic]
        seconds = max(known.until - now, 0.0) + known.delay * (0.1 + self._noise())
        return Unavailable(known.reason, retry_after_seconds=round(seconds, 3), part=f"topic {topic}")
