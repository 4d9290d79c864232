"""Replays as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outbox_relay.admin.text import replace_unprintable, table

_FILTER_NAMES = ("since", "until", "type", "key", "tenant")
HEADER = ("REPLAY", "SINK", "STATE", "TOTAL", "DELIVERED", "FAILED", "WAITING", "STARTED", "FILTER")


def replays_text(found: Sequence[dict[str, Any]]) -> str:
    """Render a list of replays as a table."""
    lines = table([HEADER, *map(_row, found)]) if found else ["there is no replay"]
    lines += [f"replay {each['id']} waits: {each['waits_for']}" for each in found if each["waits_for"]]
    return "\n".join(map(replace_unprintable, lines))


def replay_text(found: dict[str, Any]) -> str:
    """Render one replay, a line for each fact."""
    to = "" if found["to"] is None else f", to sink {found['to']}"
    lines = [
        f"replay {found['id']} of sink {found['sink']}{to}: {found['state']}",
        f"filter: {_filter(found)}",
        f"started {found['started_at'][:19]} by {found['actor']}",
        f"{_total(found)} events match: {_parts(found)}",
    ]
    if found["ended_at"]:
        lines.append(f"ended {found['ended_at'][:19]}")
    if found["reason"]:
        lines.append(f"reason: {found['reason']}")
    if found["rate"]:
        lines.append(f"at most {found['rate']:,} events per second")
    if found["waits_for"]:
        lines.append(f"waits: {found['waits_for']}")
    return "\n".join(map(replace_unprintable, lines))


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    sink = each["sink"] if each["to"] is None else f"{each['sink']} to {each['to']}"
    counts = (f"{each[name]:,}" for name in ("delivered", "failed", "waiting"))
    return str(each["id"]), sink, each["state"], _total(each), *counts, each["started_at"][:19], _filter(each)


def _total(found: dict[str, Any]) -> str:
    return f"{found['total']:,}{'' if found['total_exact'] else '+'}"


def _parts(found: dict[str, Any]) -> str:
    names = {
        "delivered": "delivered",
        "failed": "failed",
        "waiting": "waiting",
        "dropped": "dropped",
        "passed_by": "passed by",
    }
    return ", ".join(
        f"{found[name]:,} {word}" for name, word in names.items() if found[name] or name in ("delivered", "failed")
    )


def _filter(found: dict[str, Any]) -> str:
    parts = [f"{name} {found[name]}" for name in _FILTER_NAMES if found[name] is not None]
    if found["uids"]:
        parts.append("1 uid" if found["uids"] == 1 else f"{found['uids']:,} uids")
    return ", ".join(parts)
