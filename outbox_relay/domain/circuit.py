"""Circuits: whether a destination is given events. Pure: whoever asks says what time it is."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_relay.domain.outcomes import clip


@dataclass(frozen=True, slots=True)
class CircuitPolicy:
    """When a circuit opens and how it is probed.

    It opens after ``open_after`` failures in a row of different events. The first probe comes after
    ``probe_seconds``, each further one after twice the time, up to ``probe_max_seconds``. A destination that was
    down for ``pause_after_seconds`` is paused until a person resumes it; 0 means never.
    """

    open_after: int = 20
    probe_seconds: float = 1.0
    probe_max_seconds: float = 60.0
    pause_after_seconds: float = 432_000.0


class Circuit:
    """Closed: events flow. Open: nothing is sent but one probe at a time, at growing distances.

    What is admitted belongs to a ``term``, which ends whenever the circuit opens, closes or begins a probe. What
    is reported of an ended term moves nothing: a request that was sent before the circuit opened says nothing
    about the probe. ``now`` is in seconds of a monotonic clock.
    """

    __slots__ = ("_delay", "_failing", "_policy", "_until", "last_error", "state", "term")

    def __init__(self, policy: CircuitPolicy) -> None:
        self._policy = policy
        self._failing: set[int] = set()
        self._delay = policy.probe_seconds
        self._until = 0.0
        self.term = 0
        self.state = "closed"
        """``closed``, ``open`` or ``half-open``: what people are shown."""
        self.last_error: str | None = None

    def admits(self, now: float) -> float:
        """0.0 when an event may be sent now, in the ``term`` that then holds; else seconds after which to ask again.

        What is admitted while the circuit is not closed is the probe: whoever got it reports what came of it
        by ``delivered``, ``failed`` or ``unused``.
        """
        if self.state == "closed":
            return 0.0
        if self.state == "half-open":
            return self._policy.probe_seconds
        if now < self._until:
            return self._until - now
        self._turn("half-open")
        return 0.0

    def delivered(self, term: int) -> None:
        """The destination took an event that was admitted in ``term``."""
        if term != self.term:
            return
        self._failing.clear()
        if self.state != "closed":
            self._delay = self._policy.probe_seconds
            self._turn("closed")

    def failed(
        self, event_id: int, reason: str, now: float, term: int, *, at_once: bool, retry_after: float | None = None
    ) -> bool:
        """The destination did not take an event that was admitted in ``term``; returns whether the circuit opened.

        ``at_once`` opens it without counting further, ``retry_after`` is for how long at least.
        """
        if term != self.term:
            return False
        self.last_error = clip(reason)
        if self.state == "half-open":
            self._delay = min(self._delay * 2, self._policy.probe_max_seconds)
        else:
            self._failing.add(event_id)
            if not at_once and len(self._failing) < self._policy.open_after:
                return False
        self._until = now + max(self._delay, retry_after or 0.0)
        self._turn("open")
        return True

    def unused(self, term: int) -> None:
        """The probe that was admitted in ``term`` was not needed: the next to ask gets it."""
        if term == self.term and self.state == "half-open":
            self._turn("open")

    def _turn(self, state: str) -> None:
        self.state = state
        self.term += 1
