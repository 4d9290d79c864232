"""Rows of statements as JSON values. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID


def plain(row: Any, *names: str) -> dict[str, Any]:
    """Return a row, or only the columns ``names``: times as ISO 8601 with their zone, uids as text."""
    return {name: _plain(getattr(row, name)) for name in names or row._fields}


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case UUID():
            return str(value)
        case _:
            return value


def seconds(value: float | None) -> float | None:
    """Return an age in seconds, never below 0, with its milliseconds; None for None."""
    return None if value is None else round(max(0.0, value), 3)
