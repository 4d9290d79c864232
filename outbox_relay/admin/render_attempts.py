"""Recorded attempts and running deliveries as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outbox_relay.admin.text import duration, replace_unprintable, table

ATTEMPT_HEADER = ("AT", "SINK", "ATTEMPT", "OUTCOME", "TOOK", "STATUS", "RELAY", "DETAILS")
RUNNING_HEADER = ("UID", "SINK", "TYPE", "KEY", "ATTEMPT", "RUNNING", "RELAY", "LEASE LEFT")
NOT_RECORDED = (
    'no attempt of this event is recorded: by default, sinks record failures only (record_attempts = "failures"), and '
    "records are kept for 14 days (keep_attempts_days)"
)
NOT_RUNNING = "no delivery is running as a row"


def attempts_text(found: dict[str, Any]) -> str:
    """Render the result of ``attempts`` as a table."""
    rows = [_row(attempt, attempt["sink"]) for attempt in found["attempts"]]
    return "\n".join(map(replace_unprintable, table([ATTEMPT_HEADER, *rows]) if rows else [NOT_RECORDED]))


def running_text(found: dict[str, Any]) -> str:
    """Render the result of ``running`` as a table."""
    rows = [
        (
            *(row["uid"], row["sink"], row["type"], "-" if row["key"] is None else row["key"], str(row["attempt"])),
            "unknown" if row["running_seconds"] is None else duration(row["running_seconds"]),
            *(row["relay"], duration(row["lease_seconds"])),
        )
        for row in found["running"]
    ]
    return "\n".join(map(replace_unprintable, table([RUNNING_HEADER, *rows]) if rows else [NOT_RUNNING]))


def timeline(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each attempt of one sink.

    There is none if the only one is the delivery, which the state describes.
    """
    if len(records) == 1 and records[0]["outcome"] == "delivered":
        return []
    rows = [_row(record, None) for record in records]
    return ["    " + line for line in table([(at, f"attempt {number}", *rest) for at, number, *rest in rows])]


def delivery_text(found: dict[str, Any]) -> str:
    """Describe a recorded delivery."""
    parts = [f"delivered {found['at']} by relay {found['relay']}", f"attempt {found['attempt']}"]
    if "status" in found:
        parts.append(f"status {found['status']}")
    if "milliseconds" in found:
        parts.append(f"took {_took(found)}")
    return ", ".join([*parts, *_place(found)])


def _row(record: dict[str, Any], sink: str | None) -> tuple[str, ...]:
    return (
        record["at"],
        *(() if sink is None else (sink,)),
        str(record["number"]),
        record["outcome"],
        _took(record),
        "-" if record["status"] is None else str(record["status"]),
        record["relay"],
        ", ".join(_details(record)),
    )


def _took(record: dict[str, Any]) -> str:
    return "-" if record["milliseconds"] is None else f"{record['milliseconds']:.1f} ms"


def _details(record: dict[str, Any]) -> list[str]:
    """Return the error, the destination's answer, and the place of a Kafka record."""
    detail: dict[str, Any] = record["detail"] or {}
    answer = [f"answered: {detail['answer']}"] if "answer" in detail else []
    return [*([record["error"]] if record["error"] else []), *answer, *_place(detail)]


def _place(found: dict[str, Any]) -> list[str]:
    return [f"{name} {found[name]}" for name in ("topic", "partition", "offset") if name in found]
