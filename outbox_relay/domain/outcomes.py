"""Verdicts of a sink, the delays between attempts, and the settlements that follow. Pure.

A sink returns one verdict per event. :func:`decide` turns it into a settlement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from annotated_types import Ge, Gt, Le

LAST_ERROR_CHARS = 500
"""Longest reason stored with a delivery."""
MAX_DOUBLINGS = 62
"""Doublings of the base that still fit every configurable maximum."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The destination acknowledged the event.

    The fields are for the record of the attempt: the ``status`` of the response, the duration in ``seconds``, and the
    ``detail`` of the acknowledgement, such as partition and offset. A sink sets them only for deliveries that are
    recorded. Comparisons ignore them.
    """

    status: int | None = field(default=None, compare=False)
    seconds: float | None = field(default=None, compare=False)
    detail: Mapping[str, str | int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The stored details of a failed attempt, for people: no payload, no secret.

    ``code`` is one of the codes in the documentation of the sink. ``seconds`` is the duration of the attempt,
    ``steps`` that of its parts, and ``answer`` the redacted beginning of the response.
    """

    code: str
    seconds: float | None = None
    answer: str | None = None
    steps: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The event failed and may succeed later; counts as an attempt.

    ``reason`` is stored for people: no payload, no secret. ``retry_after_seconds`` is the least delay that the
    destination requested.
    """

    reason: str
    status: int | None = None
    retry_after_seconds: float | None = None
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The destination will never accept this event."""

    reason: str
    status: int | None = None
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The destination cannot accept events; no attempt is counted.

    ``throttled``: it requests a lower rate. The circuit opens at once for at least ``retry_after_seconds``, and fewer
    concurrent requests follow. ``gone``: it is permanently removed, and the sink is paused until a person resumes it.
    ``part`` names the failing part of the destination, such as a topic. The event waits as a row, and events of other
    parts flow. ``behind``: another event is in the way. An earlier one of the same key was refused, and the key waits
    until that event is a dead letter that holds it; or another one ended the process in which this one was handled.
    ``untouched``: it was given to no handler, and its row may be claimed at once.
    """

    reason: str
    status: int | None = None
    retry_after_seconds: float | None = None
    attempt: Attempt | None = None
    throttled: bool = False
    gone: bool = False
    part: str | None = None
    behind: bool = False
    untouched: bool = False


Verdict: TypeAlias = Delivered | Failed | Refused | Unavailable

DELIVERED = Delivered()
"""The verdict of nearly every event, as one shared instance."""


@dataclass(frozen=True, slots=True)
class Done:
    """The event is settled for this sink."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The event is tried again after ``delay_seconds``, with ``attempts`` counted."""

    delay_seconds: float
    attempts: int
    error: str
    status: int | None = None
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The event is a dead letter after ``attempts``; only a person releases it.

    ``refused``: the destination will never accept it. Otherwise it failed once too often.
    """

    attempts: int
    error: str
    status: int | None = None
    attempt: Attempt | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class StandStill:
    """The destination is down: the event keeps its place, and no row is written."""

    error: str
    status: int | None = None
    retry_after_seconds: float | None = None
    attempt: Attempt | None = None


Settlement: TypeAlias = Done | RetryLater | DeadLetter | StandStill

DONE = Done()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The table ``retry`` of a sink: the delays before a failed event is tried again.

    The delay is ``base_seconds``·2ⁿ up to ``max_seconds``, ± the fraction ``jitter``.
    """

    attempts: Annotated[int, Ge(1), Le(10_000)] = 30
    """Attempts before an event is dead, 1 to 10000."""
    base_seconds: Annotated[float, Gt(0), Le(86_400)] = 1.0
    """Delay after the first failure, doubled after each further one, in seconds, above 0 and at most 86400."""
    max_seconds: Annotated[float, Gt(0), Le(604_800)] = 3600.0
    """Longest delay, also one that a destination asks for, in seconds, base_seconds to 604800."""
    jitter: Annotated[float, Ge(0), Le(1)] = 0.2
    """Part of a delay by which it is made shorter or longer at random, 0 to 1."""

    def delay_seconds(self, attempts: int, noise: float) -> float:
        """Return the delay after failure number ``attempts``, counted from 1.

        ``noise`` is drawn from [-1, 1].
        """
        doublings = min(attempts - 1, MAX_DOUBLINGS)
        return min(self.base_seconds * 2.0**doublings, self.max_seconds) * (1.0 + self.jitter * noise)

    def requested_delay(self, seconds: float | None, noise: float) -> float:
        """Return a delay that the destination requested, lengthened by jitter; 0.0 if it requested none."""
        return (seconds or 0.0) * (1.0 + self.jitter * abs(noise))


def decide(attempts: int, verdict: Verdict, policy: RetryPolicy, noise: float) -> Settlement:
    """Return the settlement of an event with ``attempts`` counted before this verdict.

    ``noise`` is drawn from [-1, 1]. The delay is at least the one that the destination requested.
    """
    match verdict:
        case Delivered():
            return DONE
        case Unavailable():
            return _wait(attempts, verdict, policy, noise)
        case Refused(reason, status, attempt):
            return DeadLetter(attempts + 1, clip(reason), status, attempt, refused=True)
        case Failed(reason, status, retry_after, attempt):
            counted = attempts + 1
            if counted >= policy.attempts:
                return DeadLetter(counted, clip(reason), status, attempt)
            delay = max(policy.delay_seconds(counted, noise), policy.requested_delay(retry_after, noise))
            return RetryLater(delay, counted, clip(reason), status, attempt)


def _wait(attempts: int, verdict: Unavailable, policy: RetryPolicy, noise: float) -> Settlement:
    """Return the settlement for a failing destination, without an attempt.

    The event becomes a waiting row if only a part of the destination fails, and keeps its place otherwise.
    """
    delay = policy.requested_delay(verdict.retry_after_seconds, noise)
    if verdict.part is None and not verdict.behind:
        return StandStill(clip(verdict.reason), verdict.status, delay or None, verdict.attempt)
    return RetryLater(delay or policy.base_seconds, attempts, clip(verdict.reason), verdict.status, verdict.attempt)


def clip(reason: str) -> str:
    """Return ``reason`` as a printable line of up to ``LAST_ERROR_CHARS``."""
    line = printable(reason)
    return line if len(line) <= LAST_ERROR_CHARS else line[: LAST_ERROR_CHARS - 1] + "…"


def printable(text: str) -> str:
    """Replace unprintable characters, such as line breaks and NUL, with spaces."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
