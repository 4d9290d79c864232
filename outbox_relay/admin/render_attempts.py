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
    """Render the result of ``attempts`` as a table, and a line for each sink that does not have the event yet."""
    rows = [_row(attempt, attempt["sink"]) for attempt in found["attempts"]]
    lines = table([ATTEMPT_HEADER, *rows]) if rows else []
    lines += map(_outstanding, found["outstanding"])
    if not rows and not any(each["error"] for each in found["outstanding"]):
        lines.insert(0, NOT_RECORDED)
    return "\n".join(map(replace_unprintable, lines))


def _outstanding(each: dict[str, Any]) -> str:
    """Describe why an event is not delivered to a sink."""
    behind = f", behind {each['behind']} of its key" if each["behind"] else ""
    parts = [f"{each['sink']}: not delivered yet{behind}"]
    if each["attempts"] or each["error"]:
        parts.append(f"counted attempts: {each['attempts']}")
    if each["circuit"] != "closed":
        since = "" if each["down_seconds"] is None else f" for {duration(each['down_seconds'])}"
        parts.append(f"the destination has been down{since}: attempts meanwhile are neither counted nor recorded")
    if each["error"]:
        ago = "" if each["error_seconds_ago"] is None else f" {duration(each['error_seconds_ago'])} ago"
        parts.append(f"last error{ago}: {each['error']}")
    return "; ".join(parts)


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
