"""Results as text: aligned tables and sentences, without colours. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NO_SINKS = "no sink is known yet: a relay registers its sinks when it starts"
NO_RELAYS = "no relay is alive: start one with outbox-relay run"
SINK_HEADER = ("SINK", "BACKLOG", "OLDEST", "WAITING", "HELD", "DEAD", "SCHEDULED", "CIRCUIT", "PAUSED", "UNOWNED")
RELAY_HEADER = ("RELAY", "VERSION", "SEEN", "SHARDS")


def status_text(found: dict[str, Any]) -> str:
    """Render the result of ``status`` as tables."""
    sinks, relays, unrouted = found["sinks"], found["relays"], found["unrouted"]
    lines = table([SINK_HEADER, *(_sink_row(name, sink) for name, sink in sinks.items())]) if sinks else [NO_SINKS]
    lines += [f"last error of {name}: {sink['last_error']}" for name, sink in sinks.items() if sink["last_error"]]
    lines += [
        f"{name} has {sink['missing_positions']} shards without a position, which no relay serves: stop every relay, "
        "then run outbox-relay rebase"
        for name, sink in sinks.items()
        if sink["missing_positions"]
    ]
    lines += [f"{name} was paused: {sink['paused_reason']}" for name, sink in sinks.items() if sink["paused_reason"]]
    lines += [
        f"{name} throttles: at most {sink['in_flight_limit']} requests at once per relay, for now"
        for name, sink in sinks.items()
        if sink["in_flight_limit"] is not None
    ]
    lines.append("")
    lines += table([RELAY_HEADER, *map(_relay_row, relays)]) if relays else [NO_RELAYS]
    if unrouted:
        lines += ["", f"types without a route, among the newest events: {', '.join(unrouted)}"]
    if found["in_default_partition"]:
        lines += [
            "",
            f"events in the DEFAULT partition of the log: {found['in_default_partition']}; is a relay running?",
        ]
    return "\n".join(map(replace_unprintable, lines))


def _sink_row(name: str, sink: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{'' if sink['backlog_exact'] else '~'}{sink['backlog']}",
        duration(sink["oldest_seconds"]),
        *(str(sink[count]) for count in ("waiting", "held", "dead", "scheduled")),
        sink["circuit"],
        "yes" if sink["paused"] else "no",
        str(sink["unowned"]),
    )


def _relay_row(relay: dict[str, Any]) -> tuple[str, ...]:
    shards = ", ".join(f"{sink} {count}" for sink, count in relay["shards"].items())
    return relay["name"], relay["version"], f"{duration(relay['seen_seconds_ago'])} ago", shards or "none"


def why_text(found: dict[str, Any]) -> str:
    """Render the result of ``why`` as a heading and a line for each sink."""
    key = "without a key" if found["key"] is None else f"key {found['key']}"
    place = f"id {found['id']}, shard {found['shard']}, {'' if found['in_log'] else 'no longer '}in the log"
    lines = [
        f"{found['uid']}  {found['type']}  {key}",
        f"emitted {found['created_at']}, {duration(found['age_seconds'])} ago; {place}",
    ]
    lines += table([(name, _state(sink, found["shard"])) for name, sink in found["sinks"].items()]) or [NO_SINKS]
    return "\n".join(map(replace_unprintable, lines))


def _state(sink: dict[str, Any], shard: int) -> str:
    parts = [_description(sink, shard)]
    if sink.get("attempts"):
        parts.append(f"attempts: {sink['attempts']}")
    if sink.get("last_error"):
        status = "" if sink["last_status"] is None else f" (status {sink['last_status']})"
        parts.append(f"last error: {sink['last_error']}{status}")
    if attempt := sink.get("last_attempt"):
        parts.append(_attempt(attempt))
    if sink.get("paused"):
        parts.append("the sink is paused")
    if sink.get("circuit", "closed") != "closed":
        parts.append(f"the circuit of the sink is {sink['circuit']}: {sink['sink_error'] or 'no reason is known'}")
    return "; ".join(parts)


def _attempt(attempt: dict[str, Any]) -> str:
    took = f" after {duration(attempt['seconds'])}" if "seconds" in attempt else ""
    answer = f", answered: {attempt['answer']}" if "answer" in attempt else ""
    return f"last attempt {duration(attempt['seconds_ago'])} ago: {attempt['code']}{took}{answer}"


def _description(sink: dict[str, Any], shard: int) -> str:
    match sink["state"]:
        case "not-routed":
            return "not routed: no pattern of this sink matches its type"
        case "delivered":
            return "delivered"
        case "passed-over":
            return 'passed over: emitted before this sink began, with start = "now"'
        case "in-log":
            return f"in the log, not yet reached by shard {shard}, {_owner(sink)}{_behind(sink)}"
        case "waiting":
            return f"waiting, due {_due(sink)}{_behind(sink)}"
        case "scheduled":
            return f"scheduled, due {_due(sink)}"
        case "held":
            return f"held{_behind(sink) or ', about to be delivered'}"
        case "under-way":
            return f"under way at relay {sink['relay']}, leased for {duration(sink['lease_seconds'])}"
        case _:
            return f"dead for {duration(sink['since_seconds'])}"


def _owner(sink: dict[str, Any]) -> str:
    if sink["owner"] is None:
        return "which no relay owns"
    return f"owned by {sink['owner']} for {duration(sink['lease_seconds'])}"


def _behind(sink: dict[str, Any]) -> str:
    if sink["behind"] is None:
        return ""
    return f", behind {'the dead letter ' if sink['behind_state'] == 'dead' else ''}{sink['behind']} of its key"


def _due(sink: dict[str, Any]) -> str:
    return f"in {duration(sink['due_in_seconds'])}" if sink["due_in_seconds"] else "now"


def duration(seconds: float) -> str:
    """Format ``seconds`` in at most two units: 0.4 s, 5 min 20 s, 3 h 12 min, 4 d 6 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    raise ValueError(seconds)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return ``rows`` as lines with aligned columns; the last column is not padded."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] + [0]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def replace_unprintable(line: str) -> str:
    """Replace unprintable characters, which a terminal would interpret, with ``?``."""
    return "".join(c if c.isprintable() else "?" for c in line)
