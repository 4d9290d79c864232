"""Records of attempts, and the attempts that are recorded. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import (
    Attempt,
    DeadLetter,
    Delivered,
    Done,
    RetryLater,
    StandStill,
    next_attempt,
    printable,
)

RecordAttempts: TypeAlias = Literal["failures", "none", "all"]
"""The attempts of a sink that are recorded.

With "failures", these are the failed ones and the delivery of an event that had failed before.
"""


class AttemptRecord(NamedTuple):
    """An attempt to be stored in ``outbox.attempt``: no payload, no header, no secret.

    ``number`` counts the attempts of the event from 1, and ``ended_at`` is a ``time.monotonic()`` value. ``seconds`` is
    the duration, None if it is not known.
    """

    id: int
    uid: str
    number: int
    outcome: str
    ended_at: float
    seconds: float | None = None
    status: int | None = None
    error: str | None = None
    detail: Mapping[str, object] | None = None


def delivery_record(
    record: RecordAttempts, event: StoredEvent, verdict: Delivered, failures: int, now: float, *, tried: bool = True
) -> AttemptRecord | None:
    """Return the record of a delivery after ``failures`` counted attempts, or None if it is not recorded.

    With "failures" it is written only if the event was tried before. ``tried`` is False if it is known that it was
    not. Otherwise the row shows it when the record is written.
    """
    if record == "none" or (record == "failures" and not tried):
        return None
    return AttemptRecord(
        *(event.id, event.uid, next_attempt(failures), "delivered", now),
        *(verdict.seconds, verdict.status, None, verdict.detail and _printable(verdict.detail)),
    )


def failure_record(
    record: RecordAttempts,
    event: StoredEvent,
    settlement: Done | RetryLater | DeadLetter | StandStill,
    failures: int,
    now: float,
) -> AttemptRecord | None:
    """Return the record of an attempt that failed after ``failures`` others, or None if it is not recorded.

    An attempt is only what was counted: a destination that is down fails without one.
    """
    if record == "none" or isinstance(settlement, Done | StandStill) or settlement.attempts == failures:
        return None
    attempt = settlement.attempt
    return AttemptRecord(
        *(event.id, event.uid, settlement.attempts, _outcome(settlement), now, attempt and attempt.seconds),
        *(settlement.status, settlement.error, None if attempt is None else _detail(attempt)),
    )


def _outcome(settlement: RetryLater | DeadLetter) -> str:
    if isinstance(settlement, RetryLater):
        return "failed"
    return "refused" if settlement.refused else "dead"


def _printable(detail: Mapping[str, str | int]) -> Mapping[str, object]:
    """Return details without unprintable characters, some of which JSON of the database cannot contain."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in detail.items()}


def _detail(attempt: Attempt) -> Mapping[str, object]:
    """Return the details of a failed attempt without unknown values."""
    answer = None if attempt.answer is None else printable(attempt.answer)
    known = {"code": attempt.code, "answer": answer, "steps": dict(attempt.steps)}
    return {name: value for name, value in known.items() if value not in (None, {})}
