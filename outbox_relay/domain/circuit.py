"""The circuit breaker of a destination, and its parts that are in trouble. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from outbox_relay.domain.outcomes import clip

DOWN_SECONDS = 30.0
"""Time after which a circuit opens, however few events there are, if every attempt since has been unavailable."""
MOST_TROUBLES = 1_000
"""Maximum number of parts that are remembered. Beyond it the one that was reported longest ago is forgotten."""
SHOWN = 5
"""Maximum number of parts whose reasons are shown."""


PAUSE_AFTER_SECONDS = 432_000.0
"""Time for which a destination may be down before its sink is paused until a person resumes it: five days."""


@dataclass(frozen=True, slots=True)
class CircuitPolicy:
    """The table ``circuit`` of a sink: when it stops because its destination is down, and the pace of its probes.

    The circuit opens after consecutive failures of ``open_after`` different events, or once nothing but unavailable
    attempts was seen for ``DOWN_SECONDS``.
    """

    open_after: Annotated[int, Ge(1), Le(10_000)] = 20
    """Failures and refusals in a row, of different events, after which the circuit opens, 1 to 10000."""
    probe_seconds: Annotated[float, Gt(0), Le(3600)] = 1.0
    """Time to the first probe, doubled after each further one, in seconds, above 0 and at most 3600."""
    probe_max_seconds: Annotated[float, Gt(0), Le(86_400)] = 60.0
    """Longest time between probes, in seconds, probe_seconds to 86400."""


class Circuit:
    """A circuit breaker: closed while events flow, open while only probes are sent.

    Probes are sent one at a time, at growing intervals.

    Every admission belongs to a ``term``. A term ends when the circuit opens, closes or begins a probe, and reports
    of an ended term change nothing: a request that was sent before the circuit opened says nothing about the probe.
    ``now`` is in seconds of a monotonic clock.
    """

    __slots__ = (
        *("_delay", "_failing", "_policy", "_until", "deliveries", "failing_since", "failures", "last_error"),
        *("refused_probes", "state", "term", "unavailable_since"),
    )

    def __init__(self, policy: CircuitPolicy) -> None:
        self._policy = policy
        self._failing: set[int] = set()
        self._delay = policy.probe_seconds
        self._until = 0.0
        self.term = 0
        self.state = "closed"
        """``closed``, ``open`` or ``half-open``, as status shows it."""
        self.last_error: str | None = None
        self.failures = 0
        """The number of failures that counted."""
        self.deliveries = 0
        """The number of calls that were delivered."""
        self.failing_since: float | None = None
        """The time of the first failure that no delivery has followed; None if there is none."""
        self.unavailable_since: float | None = None
        """The time since which every attempt was unavailable; None if the destination answered the last one."""
        self.refused_probes: set[int] = set()
        """The events whose probes the destination answered with a failure since it was last closed."""

    def admission_delay(self, now: float) -> float:
        """Return 0.0 to admit an event in the current ``term``, else seconds to wait.

        An event admitted while the circuit is not closed is the probe. Its result must be reported by ``delivered``,
        ``failed`` or ``unused``.
        """
        if self.state == "closed":
            return 0.0
        if self.state == "half-open":
            return self._policy.probe_seconds
        if now < self._until:
            return self._until - now
        self._turn("half-open")
        return 0.0

    def may_probe(self, now: float) -> bool:
        """Return True if the next admission would be a probe."""
        return self.state == "open" and now >= self._until

    def next_probe_at(self, now: float) -> float:
        """Return when the wait for the next probe ends; never if none is waited for."""
        return self._until if self.state == "open" and self._until > now else float("inf")

    def delivered(self, term: int) -> None:
        """Record that the destination accepted an event admitted in ``term``."""
        self.deliveries += 1
        if term != self.term:
            return
        self._failing.clear()
        self.refused_probes.clear()
        self.failing_since = self.unavailable_since = None
        if self.state != "closed":
            self._delay = self._policy.probe_seconds
            self._turn("closed")

    def answered(self, term: int) -> None:
        """Record that the destination answered an event admitted in ``term``, which says nothing else about it."""
        if term == self.term:
            self.unavailable_since = None

    def failed(self, event_id: int, reason: str, now: float, term: int) -> bool:
        """Record that the destination answered an event admitted in ``term`` with a failure.

        Return True if that opened the circuit.
        """
        if term != self.term:
            return False
        self.unavailable_since = None
        if self.state == "half-open":
            self.refused_probes.add(event_id)
        return self._count(event_id, reason, now, at_once=False)

    def unavailable(
        self, event_id: int, reason: str, now: float, term: int, *, at_once: bool, retry_after: float = 0.0
    ) -> bool:
        """Record that the destination could not accept an event admitted in ``term``.

        Return True if that opened the circuit, which one event does with ``at_once``. It stays open for at least
        ``retry_after`` seconds.
        """
        if term != self.term:
            return False
        if self.unavailable_since is None:
            self.unavailable_since = now
        at_once = at_once or now - self.unavailable_since >= DOWN_SECONDS
        return self._count(event_id, reason, now, at_once=at_once, retry_after=retry_after)

    def _count(self, event_id: int, reason: str, now: float, *, at_once: bool, retry_after: float = 0.0) -> bool:
        self.last_error = clip(reason)
        self.failures += 1
        if self.failing_since is None:
            self.failing_since = now
        if self.state == "half-open":
            self._delay = min(self._delay * 2, self._policy.probe_max_seconds)
        else:
            self._failing.add(event_id)
            if not at_once and len(self._failing) < self._policy.open_after:
                return False
        self._until = now + max(self._delay, retry_after)
        self._turn("open")
        return True

    def retry_delay(self, now: float) -> float:
        """Return the seconds until the next attempt of an event that was unavailable while the circuit is closed.

        They double while the destination answers nothing, and one attempt comes when the circuit is to open.
        """
        down = 0.0 if self.unavailable_since is None or self.state != "closed" else now - self.unavailable_since
        delay = max(self._policy.probe_seconds, min(down, DOWN_SECONDS - down))
        return min(delay, self._policy.probe_max_seconds)

    def probe_now(self) -> bool:
        """End the wait for the next probe; return False if none is waited for. The interval after it stays."""
        if self.state != "open":
            return False
        self._until = float("-inf")
        return True

    def unused(self, term: int) -> None:
        """Return the unused probe of ``term``, so that the next event becomes the probe."""
        if term == self.term and self.state == "half-open":
            self._turn("open")

    def _turn(self, state: str) -> None:
        self.state = state
        self.term += 1


class Troubles:
    """The last reason of every part in trouble, such as a topic, while others accept events.

    ``now`` is in seconds of a monotonic clock.
    """

    __slots__ = ("_reported_at", "reasons")

    def __init__(self) -> None:
        self.reasons: Mapping[str, str] = {}
        """The reasons by part, in the order in which the troubles began. It is replaced and never changed."""
        self._reported_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.reasons)

    def report(self, part: str, reason: str, now: float) -> None:
        """Record that ``part`` is in trouble."""
        self._reported_at.pop(part, None)
        if len(self._reported_at) >= MOST_TROUBLES:
            self._remove({next(iter(self._reported_at))})
        self._reported_at[part] = now
        if self.reasons.get(part) != reason:
            self.reasons = {**self.reasons, part: reason}

    def forget(self, until: float) -> None:
        """Forget the parts that were last reported until then. Their events were delivered, or are dead."""
        self._remove({part for part, at in self._reported_at.items() if at <= until})

    def _remove(self, parts: set[str]) -> None:
        for part in parts:
            self._reported_at.pop(part, None)
        if parts:
            self.reasons = {part: reason for part, reason in self.reasons.items() if part not in parts}

    @property
    def text(self) -> str | None:
        """The reasons in one line, of at most ``SHOWN`` parts; None without trouble."""
        shown = list(self.reasons.values())[:SHOWN]
        more = f"; and {len(self) - SHOWN} more" if len(self) > SHOWN else ""
        return clip("; ".join(shown)) + more if shown else None
