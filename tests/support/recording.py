"""Recorders of attempts, and parameters of statements that record none."""

from __future__ import annotations

from typing import Any

from outbox_relay.postgres.parameters import record_columns
from outbox_relay.relay.settle import AttemptRecorder
from tests.support.logs import RecordedLog


def unrecorded(rows: int) -> dict[str, Any]:
    """Return the parameters of a statement on as many rows, none of which has an attempt to be recorded."""
    return {"relay": "here", "only_tried": False, **record_columns([None] * rows)}


def settled_unrecorded() -> dict[str, Any]:
    """Return the parameters of a settlement without a recorded attempt."""
    return unrecorded(0)


def a_recorder() -> AttemptRecorder:
    """Return the recorder of a relay with the name "here"."""
    return AttemptRecorder("here", RecordedLog())
