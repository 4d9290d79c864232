"""Results as text: aligned tables and sentences, without colours. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outbox_relay.admin.render_replays import replays_text
from outbox_relay.admin.text import duration, replace_unprintable, table
from outbox_relay.retention.wording import keepers_text, left_text

NO_SINKS = "no sink is known yet: a relay registers its sinks when it starts"
UNKNOWN = "?"
"""A figure that the database did not return in time."""
NO_RELAYS = "no relay is alive: start one with outbox-relay run"
SINK_HEADER = ("SINK", "BACKLOG", "OLDEST", "WAITING", "HELD", "DEAD", "SCHEDULED", "CIRCUIT", "PAUSED", "UNOWNED")
MENDED_SECONDS = 3600.0
"""Time for which an error that is over is shown."""
RELAY_HEADER = ("RELAY", "VERSION", "SEEN", "SHARDS")


def status_text(found: dict[str, Any]) -> str:
    """Render the result of ``status`` as tables."""
    sinks, relays, unrouted = found["sinks"], found["relays"], found["unrouted"]
    lines = table([SINK_HEADER, *(_sink_row(name, sink) for name, sink in sinks.items())]) if sinks else [NO_SINKS]
    lines += [line for name, sink in sinks.items() if (line := _last_error(name, sink))]
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
    if relays is not None:
        lines += table([RELAY_HEADER, *map(_relay_row, relays)]) if relays else [NO_RELAYS]
    if unrouted:
        lines += ["", f"types without a route, among the newest events: {', '.join(unrouted)}"]
    if found["in_default_partition"]:
        lines += [
            "",
            f"events in the DEFAULT partition of the log: {found['in_default_partition']}; "
            "start a relay, which makes partitions",
        ]
    lines += _retention_lines(found["retention"]) if found["retention"] else []
    if found.get("replays"):
        lines += ["", *replays_text(found["replays"]).splitlines()]
    return "\n".join(map(replace_unprintable, lines))


def limits_text(sink: Mapping[str, Any]) -> str:
    """Return the limits of a sink across all relays; empty without any."""
    rate, total = sink["rate_per_second"], sink["max_in_flight_total"]
    limits = [] if rate is None else [f"{rate:g} events per second"]
    limits += [] if total is None else [f"{total} requests in flight"]
    return f"at most {' and '.join(limits)} on all relays" if limits else ""


def not_answered_lines(found: dict[str, Any]) -> list[str]:
    """Return a line for each part of ``status`` that the database did not answer."""
    return [f"not answered: {each['part']}: {each['reason']}" for each in found["not_answered"]]


def _last_error(name: str, sink: dict[str, Any]) -> str | None:
    """Return a line on the last error, or on its end for ``MENDED_SECONDS``."""
    ago, mended = sink["last_error_seconds_ago"], sink["last_error_mended_seconds_ago"]
    when = "" if ago is None else f", {duration(ago)} ago"
    if sink["last_error"]:
        return f"last error of {name}{when}: {sink['last_error']}"
    if mended is not None and mended < MENDED_SECONDS:
        return f"last error of {name}{when}, over for {duration(mended)}: {sink['mended_error']}"
    return None


def _retention_lines(found: dict[str, Any]) -> list[str]:
    if not found["blocked"]:
        return []
    lines = [f"days past keep_days ({found['keep_days']}) that are not emptied: {len(found['blocked'])}"]
    if found["hold_until"]:
        lines.append(f"the clock has jumped, or no relay ran for a day: no day is emptied before {found['hold_until']}")
    if found["idle"]:
        since = f"since {found['last_pass'][:19]}" if found["last_pass"] else "yet"
        lines.append(f"no relay empties days, no pass {since}: set [retention] enabled = true, or run retention run")
    for reason, days in _by_reason(found["blocked"]).items():
        lines.append(f"  {days[0]}{f' to {days[-1]}' if len(days) > 1 else ''}: {reason}")
    return ["", *lines]


def _by_reason(blocked: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for day in blocked:
        kept = keepers_text(day["kept_by"])
        reason = f"kept by {kept}" if kept else f"due at the next pass{left_text(day)}"
        reasons.setdefault(reason, []).append(day["day"])
    return reasons


def _sink_row(name: str, sink: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        *_backlog_cells(sink),
        sink["circuit"],
        "yes" if sink["paused"] else "no",
        str(sink["unowned"]),
    )


def _backlog_cells(sink: dict[str, Any]) -> tuple[str, ...]:
    if sink["backlog"] is None:
        return (UNKNOWN,) * 6
    return (
        f"{'' if sink['backlog_exact'] else '~'}{sink['backlog']}",
        duration(sink["oldest_seconds"]),
        *(str(sink[count]) for count in ("waiting", "held", "dead", "scheduled")),
    )


def _relay_row(relay: dict[str, Any]) -> tuple[str, ...]:
    shards = ", ".join(f"{sink} {count}" for sink, count in relay["shards"].items())
    return relay["name"], relay["version"], f"{duration(relay['seen_seconds_ago'])} ago", shards or "none"
