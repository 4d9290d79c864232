"""Verdicts, and what follows from them: pure decisions that are given the noise and the policy they need.

A sink answers one verdict per event. :func:`decide` makes a settlement of it. Neither reads a clock, draws
a random number or waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

LAST_ERROR_CHARS = 500
"""Longest reason kept with a delivery."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The destination has acknowledged the event."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is kept of an attempt that did not deliver, for people: no payload, no secret.

    ``code`` says in a word what happened (the sink's documentation lists its words). ``seconds`` is how long it
    took, ``steps`` how long its parts did. ``answer`` is the beginning of what the destination said, redacted.
    """

    code: str
    seconds: float | None = None
    answer: str | None = None
    steps: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """This event failed and may succeed later: counts as an attempt.

    ``reason`` is for people and is stored: no payload, no secret. ``retry_after_seconds`` is the least
    delay that the destination asked for.
    """

    reason: str
    status: int | None = None
    retry_after_seconds: float | None = None
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The destination will never take this event."""

    reason: str
    status: int | None = None
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The destination is down, or says so: nothing is held against the event, no attempt is counted.

    ``throttled``: it asks for less; the circuit opens at once, for ``retry_after_seconds`` at least, and fewer
    requests go at once afterwards. ``gone``: it says that it will never be back; the sink is paused until a person
    resumes it. ``part`` names the part of the destination that is in trouble (a topic) while the rest of it is not:
    the event waits as a row, the others flow.
    """

    reason: str
    status: int | None = None
    retry_after_seconds: float | None = None
    attempt: Attempt | None = None
    throttled: bool = False
    gone: bool = False
    part: str | None = None


Verdict: TypeAlias = Delivered | Failed | Refused | Unavailable

DELIVERED = Delivered()
"""The verdict of nearly every event; one instance serves all."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed event is tried again: ``base_seconds``·2ⁿ up to ``max_seconds``, ± ``jitter`` (a fraction)."""

    attempts: int = 30
    base_seconds: float = 1.0
    max_seconds: float = 3600.0
    jitter: float = 0.2

    def delay_seconds(self, attempts: int, noise: float) -> float:
        """Seconds to wait after failure number ``attempts`` (from 1); ``noise`` is drawn from [-1, 1]."""
        doublings = min(attempts - 1, 62)
        return min(self.base_seconds * 2.0**doublings, self.max_seconds) * (1.0 + self.jitter * noise)


@dataclass(frozen=True, slots=True)
class Done:
    """Settled: the event needs nothing more from this sink."""


@dataclass(frozen=True, slots=True)
class Retry:
    """To be tried again after ``delay_seconds``, with ``attempts`` counted so far."""

    delay_seconds: float
    attempts: int
    error: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead letter, after ``attempts``: only a person moves it on."""

    attempts: int
    error: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class StandStill:
    """The destination is down: the event stays where it is, nothing is written."""

    error: str
    retry_after_seconds: float | None = None


Settlement: TypeAlias = Done | Retry | Dead | StandStill

DONE = Done()


def decide(attempts: int, verdict: Verdict, policy: RetryPolicy, noise: float) -> Settlement:
    """The settlement of an event that had ``attempts`` counted before this verdict.

    ``noise`` is drawn from [-1, 1] by the caller. A delay that the destination asked for is never undercut:
    jitter on it only lengthens.
    """
    match verdict:
        case Delivered():
            return DONE
        case Unavailable(reason, _, retry_after):
            return StandStill(clip(reason), retry_after)
        case Refused(reason, status):
            return Dead(attempts + 1, clip(reason), status)
        case Failed(reason, status, retry_after):
            counted = attempts + 1
            if counted >= policy.attempts:
                return Dead(counted, clip(reason), status)
            delay = policy.delay_seconds(counted, noise)
            if retry_after is not None:
                delay = max(delay, retry_after * (1.0 + policy.jitter * abs(noise)))
            return Retry(delay, counted, clip(reason), status)


def clip(reason: str) -> str:
    """``reason`` in one printable line of at most ``LAST_ERROR_CHARS`` characters."""
    line = "".join(c if c.isprintable() else " " for c in reason)
    return line if len(line) <= LAST_ERROR_CHARS else line[: LAST_ERROR_CHARS - 1] + "…"


@dataclass(frozen=True, slots=True)
class CircuitPolicy:
    """When a circuit opens, in failures in a row of different events, and when it is probed, in seconds, doubling."""

    open_after: int = 20
    probe_seconds: float = 1.0
    probe_max_seconds: float = 60.0


class Circuit:
    """Whether a destination is given events. Open: nothing is sent but one probe at a time, at growing distances.

    Every time it is asked or told something it is given ``now``, in seconds of a monotonic clock.
    """

    __slots__ = ("_delay", "_failing", "_policy", "_probing", "_until", "last_error", "state")

    def __init__(self, policy: CircuitPolicy) -> None:
        self._policy = policy
        self._failing: set[int] = set()
        self._delay = policy.probe_seconds
        self._until = 0.0
        self._probing = False
        self.state = "closed"
        """``closed``, ``open`` or ``half-open``: what people are shown."""
        self.last_error: str | None = None

    def admits(self, now: float) -> float:
        """0.0 when an event may be sent now, else seconds after which to ask again.

        What is admitted while the circuit is not closed is the probe: whoever got it reports what came of it
        by ``delivered``, ``failed`` or ``unused``.
        """
        if self.state == "closed":
            return 0.0
        if self._probing:
            return self._policy.probe_seconds
        if now < self._until:
            return self._until - now
        self._probing = True
        self.state = "half-open"
        return 0.0

    def delivered(self) -> None:
        """The destination took an event."""
        self._failing.clear()
        self._delay = self._policy.probe_seconds
        self._probing = False
        self.state = "closed"

    def failed(
        self, event_id: int, reason: str, now: float, *, at_once: bool, retry_after: float | None = None
    ) -> None:
        """The destination did not take an event; ``at_once`` opens the circuit without counting further."""
        if self.state == "open":
            return
        self.last_error = clip(reason)
        if self.state == "half-open":
            self._delay = min(self._delay * 2, self._policy.probe_max_seconds)
        else:
            self._failing.add(event_id)
            if not at_once and len(self._failing) < self._policy.open_after:
                return
        self.state = "open"
        self._probing = False
        self._until = now + max(self._delay, retry_after or 0.0)

    def unused(self) -> None:
        """The probe that was admitted was not needed."""
        self._probing = False
