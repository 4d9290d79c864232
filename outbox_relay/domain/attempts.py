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
    detail = verdict.detail and _printable(verdict.detail)
    return AttemptRecord(
        event.id, event.uid, failures + 1, "delivered", now, verdict.seconds, verdict.status, detail=detail
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
    attempt, outcome = settlement.attempt, "failed"
    if isinstance(settlement, DeadLetter):
        outcome = "refused" if settlement.refused else "dead"
    return AttemptRecord(
        *(event.id, event.uid, settlement.attempts, outcome, now, attempt and attempt.seconds),
        *(settlement.status, settlement.error, attempt and attempt_details(attempt)),
    )


def attempt_details(attempt: Attempt) -> dict[str, object]:
    """Return the details of a failed attempt without unknown values."""
    answer = attempt.answer and printable(attempt.answer)
    details = {"code": attempt.code, "answer": answer, "steps": dict(attempt.steps)}
    return {name: value for name, value in details.items() if value not in (None, {})}


def _printable(detail: Mapping[str, str | int]) -> Mapping[str, object]:
    """Return details without unprintable characters, some of which JSON of the database cannot contain."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in detail.items()}
