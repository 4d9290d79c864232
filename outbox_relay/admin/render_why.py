"""The state of an event as text. Pure."""

from __future__ import annotations

from typing import Any

from outbox_relay.admin.render import NO_SINKS
from outbox_relay.admin.render_attempts import delivery_text, timeline
from outbox_relay.admin.text import duration, replace_unprintable, table

OVER = {
    "start": 'passed over: emitted before this sink began, with start = "now"',
    "seek": "skipped by sinks seek",
}
PASSED_BY = {
    "row": "the sink had a row of it",
    "discarded": "it had been discarded",
}
UNKNOWN = {
    "rebase needed": "the database was restored: stop every relay, then run outbox-relay rebase",
    "past retention": "the event is past retention, and no record of its delivery is kept",
    "before a rebase": "the event is older than the last rebase",
    "routes changed": "it was waiting when the routes of the sink changed: the old or the new ones may have applied",
    "sink moved": "it was waiting when the sink was put at another place: it was skipped, or a relay had it already",
}


def why_text(found: dict[str, Any]) -> str:
    """Render the result of ``why`` as a heading and a line for each sink, with its recorded attempts below."""
    lines = _heading(found)
    states = table([(name, state_text(sink, found["shard"])) for name, sink in found["sinks"].items()])
    for line, sink in zip(states, found["sinks"].values(), strict=True):
        lines += [line, *timeline(sink["attempts_recorded"])]
    if not states:
        lines.append(NO_SINKS)
    return "\n".join(map(replace_unprintable, lines))


def why_key_text(found: dict[str, Any]) -> str:
    """Render the result of ``why_key``: each event as ``why_text`` does, with an empty line between them."""
    events = [why_text(event) for event in found["events"]]
    if not found["complete"]:
        events.append(f"the search ended after its time limit at events of {found['searched_since']}")
    return "\n\n".join(events) or "the log has no event with this key"


def _heading(found: dict[str, Any]) -> list[str]:
    if found["type"] is None:
        return [f"{found['uid']}", f"id {found['id']}, no longer in the log"]
    key = "without a key" if found["key"] is None else f"key {found['key']}"
    ranks = "".join(f", {name} {found[name]}" for name in ("tenant", "priority") if found.get(name) is not None)
    place = f"id {found['id']}, shard {found['shard']}, {'' if found['in_log'] else 'no longer '}in the log"
    return [
        f"{found['uid']}  {found['type']}  {key}{ranks}",
        f"emitted {found['created_at']}, {duration(found['age_seconds'])} ago; {place}",
    ]


def state_text(sink: dict[str, Any], shard: int | None) -> str:
    """Return the state of an event in one sink of ``why`` as a sentence."""
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
    elif sink.get("sink_error") and not sink.get("last_error"):
        parts.append(f"last error of the sink: {sink['sink_error']}")
    parts += [_replay(replay) for replay in sink.get("replays", ())]
    return "; ".join(parts)


def _replay(replay: dict[str, Any]) -> str:
    reason = f", {PASSED_BY[replay['reason']]}" if "reason" in replay else ""
    return f"in replay {replay['id']} ({replay['state']}): {replay['outcome']}{reason}"


def _attempt(attempt: dict[str, Any]) -> str:
    took = f" after {duration(attempt['seconds'])}" if "seconds" in attempt else ""
    answer = f", answered: {attempt['answer']}" if "answer" in attempt else ""
    return f"last attempt {duration(attempt['seconds_ago'])} ago: {attempt['code']}{took}{answer}"


def _description(sink: dict[str, Any], shard: int | None) -> str:
    match sink["state"]:
        case "not routed":
            return "not routed: no pattern at that time matched its type"
        case "delivered":
            return delivery_text(sink)
        case "settled":
            return "delivered; no record was kept"
        case "discarded":
            return f"discarded at {sink['at']} by {sink['by'] or 'role ' + sink['role']}: {sink['reason']}"
        case "passed over":
            return f"{OVER[sink['by']]}, at {sink['at']}"
        case "pending":
            again = "to be delivered again; " if sink["again"] else ""
            return f"{again}in the log, not yet delivered (shard {shard}), {_owner(sink)}{_behind(sink)}"
        case "unknown":
            return f"unknown: {UNKNOWN[sink['reason']]}"
        case "erased":
            return "erased: its payload, headers and key were removed"
        case _:
            return _parked(sink)


def _parked(sink: dict[str, Any]) -> str:
    match sink["state"]:
        case "waiting" if "relay" in sink:
            return f"under way at relay {sink['relay']}, leased for another {duration(sink['lease_seconds'])}"
        case "waiting":
            return f"waiting, due {_due(sink)}{_behind(sink)}"
        case "scheduled":
            return f"scheduled, due {_due(sink)}"
        case "held":
            return f"held{_behind(sink) or ', about to be delivered'}"
        case _:
            return f"dead for {duration(sink['since_seconds'])}"


def _owner(sink: dict[str, Any]) -> str:
    if sink["owner"] is None:
        return "which no relay owns"
    return f"owned by {sink['owner']}, leased for another {duration(sink['lease_seconds'])}"


def _behind(sink: dict[str, Any]) -> str:
    if sink["behind"] is None:
        return ""
    return f", behind {'the dead letter ' if sink['behind_state'] == 'dead' else ''}{sink['behind']} of its key"


def _due(sink: dict[str, Any]) -> str:
    return f"in {duration(sink['due_in_seconds'])}" if sink["due_in_seconds"] else "now"
