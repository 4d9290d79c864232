"""The list of sinks as text. Pure."""

from __future__ import annotations

from typing import Any

from outbox_relay.admin.render import NO_SINKS, replace_unprintable, table

HEADER = ("SINK", "GENERATION", "START", "SINCE", "PAUSED", "PATTERNS", "RELAYS")
FORMER_HEADER = ("REMOVED SINK", "SINCE", "BY")


def sinks_text(found: dict[str, Any]) -> str:
    """Render the result of ``sinks`` as tables."""
    lines = table([HEADER, *map(_sink, found["sinks"])]) if found["sinks"] else [NO_SINKS]
    if found["former"]:
        lines += ["", *table([FORMER_HEADER, *map(_former, found["former"])])]
    return "\n".join(map(replace_unprintable, lines))


def _sink(sink: dict[str, Any]) -> tuple[str, ...]:
    relays = [relay["name"] + ("" if relay["serves"] else " (does not serve it)") for relay in sink["relays"]]
    return (
        sink["name"],
        str(sink["generation"]),
        sink["start"],
        sink["since"][:19],
        "yes" if sink["paused"] else "no",
        " ".join(sink["patterns"]) or "none",
        ", ".join(relays) or "none",
    )


def _former(former: dict[str, Any]) -> tuple[str, ...]:
    by = former["actor"] or former["role_name"]
    return former["name"], former["removed_at"][:19], by
