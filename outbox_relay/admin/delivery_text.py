"""Deliveries and actions as text: tables and sentences, without colours. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outbox_relay.admin.deliveries import Matched
from outbox_relay.admin.render import duration, replace_unprintable, table
from outbox_relay.admin.render_attempts import timeline

LIST_HEADER = ("UID", "SINK", "TYPE", "KEY", "STATE", "ATTEMPTS", "STATUS", "SINCE", "ERROR")
SUMMARY_HEADER = ("SINK", "TYPE", "STATE", "COUNT", "FIRST", "LAST", "ERROR")
AUDIT_HEADER = ("AT", "ROLE", "ACTOR", "ACTION", "SINK", "COUNT", "FILTER", "REASON")
KEY_CHARS, ERROR_CHARS = 40, 100
"""Longest key and error in a table."""


def deliveries_text(found: Sequence[dict[str, Any]], matched: Matched) -> str:
    """Render a list of deliveries as a table, and a line with their number if there are more."""
    if not found:
        return "no delivery matches" if matched.exact else "none of the newest 1,000,000 deliveries of a sink matches"
    lines = table([LIST_HEADER, *map(_list_row, found)])
    if not matched.exact or matched.count > len(found):
        lines += ["", f"{len(found):,} of {matched}"]
    return _joined(lines)


def _list_row(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        found["uid"],
        found["sink"],
        found["type"],
        _cut(found["key"], KEY_CHARS),
        found["state"],
        str(found["attempts"]),
        _or_dash(found["status"]),
        _time(found["since"]),
        _cut(found["error"], ERROR_CHARS),
    )


def summary_text(found: dict[str, Any]) -> str:
    """Render the groups of a summary as a table."""
    groups = found["groups"]
    if not groups:
        return "no delivery matches"
    lines = table([SUMMARY_HEADER, *map(_summary_row, groups)])
    if not found["exact"]:
        lines += ["", "only the newest 100,000 deliveries were counted"]
    return _joined(lines)


def _summary_row(group: dict[str, Any]) -> tuple[str, ...]:
    error = group["error"] if group["status"] is None else f"status {group['status']}: {group['example'] or 'no text'}"
    times = (_time(group["first"]), _time(group["last"]))
    return (group["sink"], group["type"], group["state"], str(group["count"]), *times, _cut(error, ERROR_CHARS))


def show_text(found: dict[str, Any]) -> str:
    """Render an event and its deliveries, with its payload if that was read."""
    key = "without a key" if found["key"] is None else f"key {found['key']}"
    lines = [
        f"{found['uid']}  {found['type']}  {key}",
        f"emitted {found['created_at']}; id {found['id']}, shard {found['shard']}, {found['content_type']}",
    ]
    rows = table([(delivery["sink"], _delivery(delivery)) for delivery in found["deliveries"]])
    for row, delivery in zip(rows, found["deliveries"], strict=True):
        lines += [row, *timeline(delivery["attempts_recorded"])]
    if "payload" in found:
        lines += [f"headers: {json.dumps(found['headers'], ensure_ascii=False)}", *_payload_lines(found)]
    return _joined(lines)


def _delivery(found: dict[str, Any]) -> str:
    parts = [f"{found['state']} since {_time(found['since'])}"]
    if found["due_at"] is not None:
        parts.append(f"due {_time(found['due_at'])}")
    if found["relay"] is not None:
        parts.append(f"under way at relay {found['relay']}")
    parts.append(f"attempts: {found['attempts']}")
    if found["error"]:
        parts.append(f"last error: {found['error']}" + _status(found["status"]))
    if attempt := found["last_attempt"]:
        answer = f", answered: {attempt['answer']}" if "answer" in attempt else ""
        parts.append(f"last attempt {duration(attempt['seconds_ago'])} ago: {attempt['code']}{answer}")
    return "; ".join(parts)


def _payload_lines(found: dict[str, Any]) -> list[str]:
    if found["payload"] is None:
        return ["no payload"]
    return [f"payload ({found['payload_encoding']}):", *found["payload"].splitlines()]


def audit_text(found: Sequence[dict[str, Any]]) -> str:
    """Render actions as a table."""
    return _joined(table([AUDIT_HEADER, *map(_audit_row, found)])) if found else "no action is recorded"


def _audit_row(found: dict[str, Any]) -> tuple[str, ...]:
    recorded: dict[str, Any] = found["filter"] or {}
    shown = {name: value for name, value in recorded.items() if name != "as_of"}  # it is close to `at`
    return (
        _time(found["at"]),
        found["role"],
        _or_dash(found["actor"]),
        found["action"],
        _or_dash(found["sink"]),
        str(found["count"]),
        _cut(json.dumps(shown) if shown else None, ERROR_CHARS),
        _or_dash(found["reason"]),
    )


def _status(status: int | None) -> str:
    return "" if status is None else f" (status {status})"


def _time(value: str) -> str:
    """Return an ISO time without fractions of a second."""
    head, dot, rest = value.partition(".")
    return f"{head}{rest.lstrip('0123456789')}" if dot else value


def _cut(value: str | None, most: int) -> str:
    if value is None:
        return "-"
    return value if len(value) <= most else f"{value[: most - 1]}…"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(map(replace_unprintable, lines))
