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
    the event waits as a row, the others flow. ``behind``: an event of its key before it was refused, and nothing of
    the key is sent until that one is a dead letter that holds it; that too says nothing about the destination.
    """

    reason: str
    status: int | None = None
    retry_after_seconds: float | None = None
    attempt: Attempt | None = None
    throttled: bool = False
    gone: bool = False
    part: str | None = None
    behind: bool = False


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
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead letter, after ``attempts``: only a person moves it on."""

    attempts: int
    error: str
    status: int | None = None
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class StandStill:
    """The destination is down: the event stays where it is, nothing is written."""

    error: str
    status: int | None = None
    retry_after_seconds: float | None = None
    attempt: Attempt | None = None


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
        case Unavailable():
            return _wait(attempts, verdict, policy, noise)
        case Refused(reason, status, attempt):
            return Dead(attempts + 1, clip(reason), status, attempt)
        case Failed(reason, status, retry_after, attempt):
            counted = attempts + 1
            if counted >= policy.attempts:
                return Dead(counted, clip(reason), status, attempt)
            delay = max(policy.delay_seconds(counted, noise), longer(retry_after, policy, noise))
            return Retry(delay, counted, clip(reason), status, attempt)


def _wait(attempts: int, verdict: Unavailable, policy: RetryPolicy, noise: float) -> Settlement:
    """No attempt is counted: with a part of the destination the event waits by itself, else where it stands."""
    delay = longer(verdict.retry_after_seconds, policy, noise)
    if verdict.part is None and not verdict.behind:
        return StandStill(clip(verdict.reason), verdict.status, delay or None, verdict.attempt)
    return Retry(delay or policy.base_seconds, attempts, clip(verdict.reason), verdict.status, verdict.attempt)


def longer(seconds: float | None, policy: RetryPolicy, noise: float) -> float:
    """A delay that somebody asked for, with jitter that only lengthens it; 0.0 when nobody did."""
    return (seconds or 0.0) * (1.0 + policy.jitter * abs(noise))


def clip(reason: str) -> str:
    """``reason`` in one printable line of at most ``LAST_ERROR_CHARS`` characters."""
    line = printable(reason)
    return line if len(line) <= LAST_ERROR_CHARS else line[: LAST_ERROR_CHARS - 1] + "…"


def printable(text: str) -> str:
    """``text`` with a space for every character that cannot be printed: line breaks, NUL, lone surrogates."""
    return "".join(c if c.isprintable() else " " for c in text)
