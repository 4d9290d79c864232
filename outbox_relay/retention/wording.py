"""Days and what keeps them, as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOCKED = "a lock was not granted; the next pass tries again"
CHANGED = "it changed while it was checked; the next pass tries again"
PASSING = (LOCKED, CHANGED)
"""Beginnings of the reasons for which a day is left that the next pass most likely does not meet."""


def day_name(day: str) -> str:
    """Return the name of a day for people: -infinity means the DEFAULT partition."""
    return "default" if day == "-infinity" else day


def keepers_text(kept_by: Sequence[dict[str, Any]]) -> str:
    """Return what keeps a day as text."""
    return "; ".join(map(_keeper, kept_by))


def locked_text(holders: Sequence[dict[str, Any]]) -> str:
    """Return the reason of a day whose lock was not granted, with the transactions that hold it."""
    return f"{LOCKED}; it is held by {keepers_text(holders)}" if holders else LOCKED


def left_text(day: dict[str, Any]) -> str:
    """Return why a pass left a due day that nothing keeps, as the end of a sentence; empty if none did."""
    return f"; left at {day['left_at'][:19]}: {day['left_because']}" if day["left_because"] else ""


def _keeper(keeper: dict[str, Any]) -> str:
    since = f" since {keeper['since']}" if keeper.get("since") else ""
    if keeper["kind"] != "sink":
        return f"{keeper['kind']} {keeper['name']}{since}"
    paused = " (paused)" if keeper.get("paused") else ""
    return f"sink {keeper['name']}{paused} with {keeper['shards']} shards{since}"
