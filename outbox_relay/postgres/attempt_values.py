"""Attempts as parameters of statements."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.outcomes import Attempt, printable

DETAIL_BYTES = 2048
"""Maximum size of the details of a recorded attempt, as JSON."""

RECORD_COLUMNS = tuple(
    f"record_{name}" for name in ("numbers", "outcomes", "ages", "milliseconds", "statuses", "errors", "details")
)
"""Names of the parameters that describe records, apart from the events that were tried."""

_PLAIN = re.compile("(?!null$)[a-z_]+")


def attempt_json(attempt: Attempt | None) -> str | None:
    """Return an attempt as a JSON object without its unknown values, or None."""
    if attempt is None:
        return None
    answer = None if attempt.answer is None else printable(attempt.answer)
    known = {"code": attempt.code, "seconds": attempt.seconds, "answer": answer, "steps": dict(attempt.steps)}
    return json.dumps({name: value for name, value in known.items() if value not in (None, {})})


def recorded_events(records: Sequence[AttemptRecord]) -> dict[str, Any]:
    """Return the ids and uids of the events of ``records`` as columns."""
    return {"record_ids": [r.id for r in records], "record_uids": [r.uid for r in records]}


def record_columns(records: Sequence[AttemptRecord | None]) -> dict[str, Any]:
    """Return the columns of ``records`` that all statements have in common. None is a row without an attempt.

    A record has its age in seconds: the database subtracts it from its own clock. A column without a value is empty,
    which ``unnest`` extends with nulls.
    """
    if not any(records):
        return dict.fromkeys(RECORD_COLUMNS, "{}")
    now = time.monotonic()
    return {
        "record_numbers": array_text([r and r.number for r in records]),
        "record_outcomes": _words([r and r.outcome for r in records]),
        "record_ages": array_text([r and now - r.ended_at for r in records]),
        "record_milliseconds": array_text([r and _milliseconds(r.seconds) for r in records]),
        "record_statuses": array_text([r and r.status for r in records]),
        "record_errors": _known([r and r.error for r in records]),
        "record_details": _known([r and detail_json(r.detail) for r in records]),
    }


def array_text(values: Sequence[float | UUID | None]) -> str:
    """Return numbers or UUIDs as the text of an array, which is made in a tenth of the time that psycopg takes."""
    return f"{{{','.join(['NULL' if value is None else str(value) for value in values])}}}"


def _words(values: Sequence[str | None]) -> str | Sequence[str | None]:
    """Return the text of an array of words that need no quotes, such as outcomes, or the values if there are others."""
    plain = all(value is None or _PLAIN.fullmatch(value) for value in set(values))
    return f"{{{','.join([value or 'NULL' for value in values])}}}" if plain else values


def _known(values: Sequence[str | None]) -> Sequence[str | None]:
    return [] if values.count(None) == len(values) else values


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def detail_json(detail: Mapping[str, object] | None) -> str | None:
    """Return details as a JSON object of at most ``DETAIL_BYTES``, or None if there are none.

    An object that is too large has no ``answer``, and none of the others if it still is.
    """
    if not detail:
        return None
    text = json.dumps(detail)
    if len(text) <= DETAIL_BYTES:
        return text
    others = {name: value for name, value in detail.items() if name != "answer"}
    return detail_json(others) if len(others) < len(detail) else None
