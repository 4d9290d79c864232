"""The record of what operators and relays changed."""

from __future__ import annotations

import re
from typing import Any

from outbox_relay.postgres.store import Store

_DURATION = re.compile(r"PT(\d{1,15})S", re.ASCII)
_TIMES = ("since", "until", "to")
_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def audit(store: Store, since: str | None, most: int) -> list[dict[str, Any]]:
    """Return up to ``most`` actions since a time or an age, newest first, for ``audit --json``.

    ``since`` is as ``outbox_internal.past_time`` in the schema reads it; None means all. A time in a filter that was
    an age is shown as a person writes it, such as 2h.

    Raises ``ConfigurationError``, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    rows = store.call("audit", {"since": since, "most": most}, "read")
    names = ("id", "action", "sink", "filter", "count", "reason", "actor", "login")
    return [
        {
            "at": row.at.isoformat(),
            "role": row.role_name,
            **{name: getattr(row, name) for name in names},
            "filter": row.filter and {**row.filter, **_ages(row.filter)},
        }
        for row in rows
    ]


def _ages(given: dict[str, Any]) -> dict[str, str]:
    """Return the times of a filter that were given as ages, which are recorded as ISO durations."""
    found = {name: _DURATION.fullmatch(str(given[name])) for name in _TIMES if name in given}
    return {name: _age(int(duration[1])) for name, duration in found.items() if duration}


def _age(seconds: int) -> str:
    unit, size = next((unit, size) for unit, size in _UNITS if seconds % size == 0)
    return f"{seconds // size}{unit}"
