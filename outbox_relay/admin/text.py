"""Results of commands as text: aligned tables and sentences, without colours. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from outbox_relay.admin.thresholds import LATE_SECONDS
from outbox_relay.retention.wording import keepers_text, left_text

if TYPE_CHECKING:
    from outbox_relay.admin.deliveries import Matched
    from outbox_relay.admin.doctor.finding import Finding
    from outbox_relay.admin.retention import RetentionRun

Values = Mapping[str, Any]
Column = str | Callable[[Values], object]
"""A column of a table: the name of a value, or a function of the values of a row."""

MOST_SECONDS: Final = 3.2e11
"""Longest time that is shown, about 10,000 years. A time of the log may be -infinity, which gives an infinite age."""
KEY_CHARS, ERROR_CHARS = 40, 100
"""Longest key and error in a table."""
MENDED_SECONDS: Final = 3600.0
"""Time for which an error that is over is shown."""
NO_SINKS: Final = "no sink is known yet: a relay registers its sinks when it starts"
FOR_ALL_TIME: Final = (
    "events are kept indefinitely: to empty old days, write [retention] with keep_days in the file of every relay"
)
OVER: Final = {
    "start": 'passed over: emitted before this sink began, with start = "now"',
    "seek": "skipped by sinks seek",
}
PASSED_BY: Final = {"row": "the sink had a row of it", "discarded": "it had been discarded"}
UNKNOWN: Final = {
    "rebase needed": "the database was restored: stop every relay, then run outbox-relay rebase",
    "past retention": "the event is past retention, and no record of its delivery is kept",
    "before a rebase": "the event is older than the last rebase",
    "routes changed": "it was waiting when the routes of the sink changed: the old or the new ones may have applied",
    "sink moved": "it was waiting when the sink was put at another place: it was skipped, or a relay had it already",
}


# -- durations, lines and tables --------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Format ``seconds`` in at most two units: 0.4 s, 5 min 20 s, 3 h 12 min, 4 d 6 h."""
    seconds = min(seconds, MOST_SECONDS)
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    raise ValueError(seconds)


def replace_unprintable(line: str) -> str:
    """Replace unprintable characters, which a terminal would interpret, with ``?``."""
    return "".join(c if c.isprintable() else "?" for c in line)


def joined(lines: Iterable[str]) -> str:
    """Return lines as one text that a terminal can show."""
    return "\n".join(map(replace_unprintable, lines))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return ``rows`` as lines with aligned columns; the last column is not padded."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] + [0]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def table(rows: Iterable[Values], **columns: Column) -> list[str]:
    """Return a table of ``rows`` under the names of ``columns``. None is shown as a dash."""
    return aligned([[name.replace("_", " ") for name in columns], *_cells(rows, columns)])


def _cells(rows: Iterable[Values], columns: Mapping[str, Column]) -> list[list[str]]:
    return [[_cell(column(row) if callable(column) else row[column]) for column in columns.values()] for row in rows]


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case _:
            return str(value)


def _cut(name: str, most: int) -> Column:
    def cell(row: Values) -> str | None:
        value = row[name]
        return value if value is None or len(value) <= most else f"{value[: most - 1]}…"

    return cell


def _time(name: str) -> Column:
    """Return the column of a time, without its zone and fractions of a second."""
    return lambda row: row[name] and row[name][:19]


def _age(name: str) -> Column:
    return lambda row: "unknown" if row[name] is None else duration(row[name])


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f" {duration(seconds)} ago"


# -- status -----------------------------------------------------------------------------------------------------------


def status_text(found: Values) -> str:
    """Render the result of ``status`` as tables."""
    sinks = [{"name": name, **sink} for name, sink in found["sinks"].items()]
    relays, retention = found["relays"], found["retention"]
    lines = [NO_SINKS]
    if sinks:
        counts: dict[str, Column] = {name.upper(): _known(name) for name in ("waiting", "held", "dead", "scheduled")}
        lines = table(
            sinks, SINK="name", BACKLOG=_backlog, OLDEST=_known("oldest_seconds", duration), **counts,
            CIRCUIT="circuit", PAUSED="paused", UNOWNED="unowned",
        )  # fmt: skip
    lines += [line for line in map(_last_error, sinks) if line]
    lines += [
        f"{sink['name']} has {sink['missing_positions']} shards without a position, which no relay serves: stop every "
        "relay, then run outbox-relay rebase"
        for sink in sinks
        if sink["missing_positions"]
    ]
    lines += [f"{sink['name']} was paused: {sink['paused_reason']}" for sink in sinks if sink["paused_reason"]]
    lines += [
        f"{sink['name']} throttles: at most {sink['in_flight_limit']} requests at once per relay, for now"
        for sink in sinks
        if sink["in_flight_limit"] is not None
    ]
    lines.append("")
    if relays:
        lines += table(
            relays, RELAY="name", VERSION="version", SEEN=lambda row: f"{duration(row['seen_seconds_ago'])} ago",
            SHARDS=lambda row: ", ".join(f"{sink} {count}" for sink, count in row["shards"].items()) or "none",
        )  # fmt: skip
    elif relays is not None:
        lines.append("no relay is alive: start one with outbox-relay run")
    if found["unrouted"]:
        lines += ["", f"types without a route, among the newest events: {', '.join(found['unrouted'])}"]
    if in_default := found["in_default_partition"]:
        lines += [
            "",
            f"events in the DEFAULT partition of the log: {in_default}; start a relay, which makes partitions",
        ]
    if retention and retention["blocked"]:
        lines += ["", *_blocked_lines(retention)]
    if found.get("replays"):
        lines += ["", *replays_text(found["replays"]).splitlines()]
    return joined(lines)


def _known(name: str, shown: Callable[[Any], str] = str) -> Column:
    """Return a column of a figure, which is unknown if the database did not count in time."""
    return lambda sink: "?" if sink[name] is None else shown(sink[name])


def _backlog(sink: Values) -> str:
    return "?" if sink["backlog"] is None else f"{'' if sink['backlog_exact'] else '~'}{sink['backlog']}"


def limits_text(sink: Values) -> str:
    """Return the limits of a sink across all relays; empty without any."""
    rate, total = sink["rate_per_second"], sink["max_in_flight_total"]
    limits = [] if rate is None else [f"{rate:g} events per second"]
    limits += [] if total is None else [f"{total} requests in flight"]
    return f"at most {' and '.join(limits)} on all relays" if limits else ""


def not_answered_lines(found: Values) -> list[str]:
    """Return a line for each part of ``status`` that the database did not answer."""
    return [f"not answered: {each['part']}: {each['reason']}" for each in found["not_answered"]]


def _last_error(sink: Values) -> str | None:
    """Return a line on the last error, or on its end for ``MENDED_SECONDS``."""
    mended, ago = sink["last_error_mended_seconds_ago"], _ago(sink["last_error_seconds_ago"])
    error = f"last error of {sink['name']}{ago and f',{ago}'}"
    if sink["last_error"]:
        return f"{error}: {sink['last_error']}"
    if mended is not None and mended < MENDED_SECONDS:
        return f"{error}, over for {duration(mended)}: {sink['mended_error']}"
    return None


# -- retention --------------------------------------------------------------------------------------------------------


def _blocked_lines(found: Values) -> list[str]:
    lines = [f"days past keep_days ({found['keep_days']}) that are not emptied: {len(found['blocked'])}"]
    lines += _hold_lines(found["hold_until"])
    if found["idle"]:
        lines.append(f"no relay empties days, {_no_pass(found)}: set [retention] enabled = true, or run retention run")
    reasons: dict[str, list[str]] = {}
    blocked: list[dict[str, Any]] = found["blocked"]
    for day in blocked:
        kept = keepers_text(day["kept_by"])
        reasons.setdefault(f"kept by {kept}" if kept else f"due at the next pass{left_text(day)}", []).append(
            day["day"]
        )
    return lines + [
        f"  {' to '.join(dict.fromkeys((days[0], days[-1])))}: {reason}" for reason, days in reasons.items()
    ]


def _hold_lines(until: object) -> list[str]:
    return [f"the clock has jumped, or no relay ran for a day: no day is emptied before {until}"] if until else []


def _no_pass(found: Values) -> str:
    return f"no pass since {found['last_pass'][:19]}" if found["last_pass"] else "no pass yet"


def retention_text(found: Values) -> str:
    """Render the result of ``retention_status`` as a table."""
    lines = [FOR_ALL_TIME]
    if found["keep_days"]:
        archived = ", archived before they are emptied" if found["archive"] else ""
        lines = [f"days are kept for {found['keep_days']} days after their end{archived}"]
        if found["lower_since"]:
            lines.append(f"a lower keep_days is configured since {found['lower_since']}; it takes effect a day later")
        lines += _hold_lines(found["hold_until"])
        lines += [f"{_no_pass(found)}: run a relay or retention run"] if found["idle"] else []
    if not found["days"]:
        return joined([*lines, "the log has no events"])
    days = table(
        found["days"], DAY="day", EVENTS="events", BYTES="bytes", ARCHIVED="archived", EMPTIED=_time("emptied"),
        KEPT_BY=_kept,
    )  # fmt: skip
    return joined([*lines, *days])


def _kept(day: Values) -> str:
    return keepers_text(day["kept_by"]) or (f"due{left_text(dict(day))}" if day["due"] else "")


def preview_text(found: Values) -> str:
    """Render the result of ``preview_retention``."""
    lines = [
        f"{day['day']}: {'kept by ' + keepers_text(day['kept_by']) if day['kept_by'] else 'would be emptied'}"
        for day in found["days"]
    ]
    lines += _hold_lines(found["hold_until"])
    return joined(lines or [_nothing_due(found["keep_days"], found["keep_days_of"])])


def outcome_text(run: RetentionRun) -> str:
    """Render a pass."""
    policy, outcome, relays = run
    lines = [f"{day}: emptied" for day in outcome.emptied]
    lines += [f"{day}: left: {reason}" for day, reason in outcome.left.items()]
    lines += [f"{day}: its empty partition was removed" for day in outcome.dropped]
    counts = {
        "uids removed": outcome.uids,
        "marks of the inbox removed": outcome.marks,
        "dead letters discarded": outcome.dead,
        "partitions and rows of old attempts removed": outcome.attempts,
    }
    lines += [f"{text}: {count}" for text, count in counts.items() if count]
    lines += _hold_lines(policy.hold_until and policy.hold_until.isoformat())
    if lines and not policy.keep_days:
        lines.append(FOR_ALL_TIME)
    return joined(lines or [_nothing_due(policy.keep_days, relays)])


def _nothing_due(keep_days: int, relays: Sequence[str]) -> str:
    """Return that no day is due, with the value that counts and the relays that have it."""
    if not keep_days:
        return FOR_ALL_TIME
    why = (
        f"the largest value of the live relays, that of {', '.join(relays)}"
        if relays  # otherwise the number is the database's default, or from an earlier time
        else "a lower value in the files of the relays counts a day later, or at once if a role of migrate "
        "--grant-operate runs retention run"
    )
    return f"no day is past keep_days, {keep_days}: {why}"


# -- deliveries -------------------------------------------------------------------------------------------------------


def deliveries_text(found: Sequence[Values], matched: Matched) -> str:
    """Render a list of deliveries as a table, and a line with their number if there are more."""
    if not found:
        return "no delivery matches" if matched.exact else "none of the newest 1,000,000 deliveries of a sink matches"
    lines = table(
        found, UID="uid", SINK="sink", TYPE="type", KEY=_cut("key", KEY_CHARS), STATE="state", ATTEMPTS="attempts",
        STATUS="status", SINCE=_time("since"), ERROR=_cut("error", ERROR_CHARS),
    )  # fmt: skip
    if not matched.exact or matched.count > len(found):
        lines += ["", f"{len(found):,} of {matched}"]
    return joined(lines)


def summary_text(found: Values) -> str:
    """Render the groups of a summary as a table."""
    if not (groups := [{**group, "text": _group_error(group)} for group in found["groups"]]):
        return "no delivery matches"
    lines = table(
        groups, SINK="sink", TYPE="type", STATE="state", COUNT="count", FIRST=_time("first"), LAST=_time("last"),
        ERROR=_cut("text", ERROR_CHARS),
    )  # fmt: skip
    return joined(lines if found["exact"] else [*lines, "", "only the newest 100,000 deliveries were counted"])


def _group_error(group: Values) -> str | None:
    return group["error"] if group["status"] is None else f"status {group['status']}: {group['example'] or 'no text'}"


def show_text(found: Values) -> str:
    """Render an event and its deliveries, with its payload if that was read."""
    lines = [
        f"{found['uid']}  {found['type']}  {_key(found)}",
        f"emitted {found['created_at']}; id {found['id']}, shard {found['shard']}, {found['content_type']}",
        *_by_sink({each["sink"]: (_delivery(each), each["attempts_recorded"]) for each in found["deliveries"]}),
    ]
    if "payload" in found:
        lines.append(f"headers: {json.dumps(found['headers'], ensure_ascii=False)}")
        payload = found["payload"]
        encoding = found["payload_encoding"]
        lines += ["no payload"] if payload is None else [f"payload ({encoding}):", *payload.splitlines()]
    return joined(lines)


def _key(found: Values) -> str:
    return "without a key" if found["key"] is None else f"key {found['key']}"


def _by_sink(states: Mapping[str, tuple[str, Sequence[Values]]]) -> list[str]:
    """Return a line for each sink with its state, and its recorded attempts below."""
    lines = aligned([(sink, state) for sink, (state, _) in states.items()])
    return [
        each
        for line, (_, attempts) in zip(lines, states.values(), strict=True)
        for each in (line, *_timeline(attempts))
    ]


def _delivery(found: Values) -> str:
    parts = [f"{found['state']} since {found['since'][:19]}"]
    if found["due_at"] is not None:
        parts.append(f"due {found['due_at'][:19]}")
    if found["relay"] is not None:
        parts.append(f"under way at relay {found['relay']}")
    parts.append(f"attempts: {found['attempts']}")
    if found["error"]:
        parts.append(f"last error: {found['error']}{_status(found['status'])}")
    if attempt := found["last_attempt"]:
        parts.append(_attempt(attempt))
    return "; ".join(parts)


def _status(status: int | None) -> str:
    return "" if status is None else f" (status {status})"


def audit_text(found: Sequence[Values]) -> str:
    """Render actions as a table."""
    if not found:
        return "no action is recorded"
    shown = [{**each, "text": _filter(each["filter"] or {})} for each in found]
    return joined(table(
        shown, AT=_time("at"), ROLE="role", ACTOR="actor", ACTION="action", SINK="sink", COUNT="count",
        FILTER=_cut("text", ERROR_CHARS), REASON="reason",
    ))  # fmt: skip


def _filter(recorded: Values) -> str | None:
    shown = {name: value for name, value in recorded.items() if name != "as_of"}  # it is close to the action's time
    return json.dumps(shown) if shown else None


# -- attempts ---------------------------------------------------------------------------------------------------------


def _took(record: Values) -> str | None:
    return None if record["milliseconds"] is None else f"{record['milliseconds']:.1f} ms"


def _details(record: Values) -> str:
    """Return the error, the destination's answer, and the place of a Kafka record."""
    detail: Values = record["detail"] or {}
    parts = [record["error"]] if record["error"] else []
    parts += [f"answered: {detail['answer']}"] if "answer" in detail else []
    return ", ".join([*parts, *_place(detail)])


def _place(found: Values) -> list[str]:
    return [f"{name} {found[name]}" for name in ("topic", "partition", "offset") if name in found]


ATTEMPT: Final[Mapping[str, Column]] = {
    "OUTCOME": "outcome",
    "TOOK": _took,
    "STATUS": "status",
    "RELAY": "relay",
    "DETAILS": _details,
}
"""The columns of an attempt after its number."""


def attempts_text(found: Values) -> str:
    """Render the result of ``attempts`` as a table, and a line for each sink that does not have the event yet."""
    lines: list[str] = []
    if found["attempts"]:
        lines = table(found["attempts"], AT="at", SINK="sink", ATTEMPT="number", **ATTEMPT)
    elif not any(each["error"] for each in found["outstanding"]):
        lines = [
            "no attempt of this event is recorded: by default, sinks record failures only (record_attempts = "
            '"failures"), and records are kept for 14 days (keep_attempts_days)'
        ]
    return joined([*lines, *map(_outstanding, found["outstanding"])])


def _outstanding(each: Values) -> str:
    """Describe why an event is not delivered to a sink."""
    behind = f", behind {each['behind']} of its key" if each["behind"] else ""
    parts = [f"{each['sink']}: not delivered yet{behind}"]
    if each["attempts"] or each["error"]:
        parts.append(f"counted attempts: {each['attempts']}")
    if each["circuit"] != "closed":
        since = "" if each["down_seconds"] is None else f" for {duration(each['down_seconds'])}"
        parts.append(f"the destination has been down{since}: attempts meanwhile are neither counted nor recorded")
    if each["error"]:
        parts.append(f"last error{_ago(each['error_seconds_ago'])}: {each['error']}")
    return "; ".join(parts)


def running_text(found: Values) -> str:
    """Render the result of ``running`` as a table."""
    if not found["running"]:
        return "no delivery is running as a row"
    return joined(table(
        found["running"], UID="uid", SINK="sink", TYPE="type", KEY="key", ATTEMPT="attempt",
        RUNNING=_age("running_seconds"), RELAY="relay", LEASE_LEFT=_age("lease_seconds"),
    ))  # fmt: skip


def _timeline(records: Sequence[Values]) -> list[str]:
    """Return a line for each attempt of one sink. One that only has the delivery has none: the state describes it."""
    if len(records) == 1 and records[0]["outcome"] == "delivered":
        return []
    columns: Mapping[str, Column] = {"AT": "at", "ATTEMPT": lambda row: f"attempt {row['number']}", **ATTEMPT}
    return [f"    {line}" for line in aligned(_cells(records, columns))]


# -- replays, schedules, sinks ----------------------------------------------------------------------------------------


def replays_text(found: Sequence[Values]) -> str:
    """Render a list of replays as a table."""
    if not found:
        return "there is no replay"
    counts: dict[str, Column] = {name.upper(): _thousands(name) for name in ("delivered", "failed", "waiting")}
    lines = table(
        found, REPLAY="id", SINK=lambda row: row["sink"] + ("" if row["to"] is None else f" to {row['to']}"),
        STATE="state", TOTAL=_total, **counts, STARTED=_time("started_at"), FILTER=_selection,
    )  # fmt: skip
    return joined(lines + [f"replay {each['id']} waits: {each['waits_for']}" for each in found if each["waits_for"]])


def replay_text(found: Values) -> str:
    """Render one replay, a line for each fact."""
    to = "" if found["to"] is None else f", to sink {found['to']}"
    words = ("delivered", "failed", "waiting", "dropped", "passed_by")
    counts = [
        f"{found[name]:,} {name.replace('_', ' ')}" for name in words if found[name] or name in ("delivered", "failed")
    ]
    lines = [
        f"replay {found['id']} of sink {found['sink']}{to}: {found['state']}",
        f"filter: {_selection(found)}",
        f"started {found['started_at'][:19]} by {found['actor']}",
        f"{_total(found)} events match: {', '.join(counts)}",
    ]
    lines += [f"ended {found['ended_at'][:19]}"] if found["ended_at"] else []
    lines += [f"reason: {found['reason']}"] if found["reason"] else []
    lines += [f"at most {found['rate']:,} events per second"] if found["rate"] else []
    lines += [f"waits: {found['waits_for']}"] if found["waits_for"] else []
    return joined(lines)


def _thousands(name: str) -> Column:
    return lambda row: f"{row[name]:,}"


def _total(found: Values) -> str:
    return f"{found['total']:,}{'' if found['total_exact'] else '+'}"


def _selection(found: Values) -> str:
    names = ("since", "until", "type", "key", "tenant")
    parts = [f"{name} {found[name]}" for name in names if found[name] is not None]
    if found["uids"]:
        parts.append("1 uid" if found["uids"] == 1 else f"{found['uids']:,} uids")
    return ", ".join(parts)


def schedules_text(found: Sequence[Values]) -> str:
    """Render a list of schedules as a table, and a line for each one that does not fire."""
    if not found:
        return "there is no schedule: a relay registers those of its file when it starts"
    lines = table(
        found, SCHEDULE="name", STATE="state", CRON="cron", TIMEZONE="timezone", TYPE="type", MISSED="missed",
        LAST=_time("last_at"), NEXT=lambda row: None if row["state"] == "paused" else (row["next_at"] or "-")[:19],
    )  # fmt: skip
    for each in found:
        if each["error"] is not None:
            failed = "failed" if each["retry_at"] is None else "refused"
            lines.append(f"schedule {each['name']}: {failed} at {each['error_at'][:19]}: {each['error']}")
        elif (each["late_seconds"] or 0.0) > LATE_SECONDS:
            late = duration(each["late_seconds"])
            lines.append(f"schedule {each['name']}: late by {late}: no relay of this version fires it")
    return joined(lines)


def sinks_text(found: Values) -> str:
    """Render the result of ``sinks`` as tables."""
    lines = [NO_SINKS]
    if found["sinks"]:
        lines = table(
            found["sinks"], SINK="name", GENERATION="generation", START="start", SINCE=_time("since"), PAUSED="paused",
            PATTERNS=lambda sink: " ".join(sink["patterns"]) or "none", RELAYS=_relays,
        )  # fmt: skip
    if found["former"]:
        by: Column = lambda former: former["actor"] or former["role_name"]  # noqa: E731
        lines += ["", *table(found["former"], REMOVED_SINK="name", SINCE=_time("removed_at"), BY=by)]
    return joined(lines)


def _relays(sink: Values) -> str:
    names = (relay["name"] + ("" if relay["serves"] else " (does not serve it)") for relay in sink["relays"])
    return ", ".join(names) or "none"


# -- why --------------------------------------------------------------------------------------------------------------


def why_text(found: Values) -> str:
    """Render the result of ``why`` as a heading and a line for each sink, with its recorded attempts below."""
    if found["type"] is None:
        lines = [f"{found['uid']}", f"id {found['id']}, no longer in the log"]
    else:
        ranks = "".join(f", {name} {found[name]}" for name in ("tenant", "priority") if found.get(name) is not None)
        place = f"id {found['id']}, shard {found['shard']}, {'' if found['in_log'] else 'no longer '}in the log"
        lines = [
            f"{found['uid']}  {found['type']}  {_key(found)}{ranks}",
            f"emitted {found['created_at']}, {duration(found['age_seconds'])} ago; {place}",
        ]
    sinks: Mapping[str, Values] = found["sinks"]
    states = {name: (state_text(sink, found["shard"]), sink["attempts_recorded"]) for name, sink in sinks.items()}
    return joined([*lines, *(_by_sink(states) or [NO_SINKS])])


def why_key_text(found: Values) -> str:
    """Render the result of ``why_key``: each event as ``why_text`` does, with an empty line between them."""
    events = [why_text(event) for event in found["events"]]
    if not found["complete"]:
        events.append(f"the search ended after its time limit at events of {found['searched_since']}")
    return "\n\n".join(events) or "the log has no event with this key"


def state_text(sink: Values, shard: int | None) -> str:
    """Return the state of an event in one sink of ``why`` as a sentence."""
    parts = [_state(sink, shard)]
    if sink.get("attempts"):
        parts.append(f"attempts: {sink['attempts']}")
    if sink.get("last_error"):
        parts.append(f"last error: {sink['last_error']}{_status(sink['last_status'])}")
    if attempt := sink.get("last_attempt"):
        parts.append(_attempt(attempt))
    if sink.get("paused"):
        parts.append("the sink is paused")
    if sink.get("circuit", "closed") != "closed":
        parts.append(f"the circuit of the sink is {sink['circuit']}: {sink['sink_error'] or 'no reason is known'}")
    elif sink.get("sink_error") and not sink.get("last_error"):
        parts.append(f"last error of the sink: {sink['sink_error']}")
    for replay in sink.get("replays", ()):
        reason = f", {PASSED_BY[replay['reason']]}" if "reason" in replay else ""
        parts.append(f"in replay {replay['id']} ({replay['state']}): {replay['outcome']}{reason}")
    return "; ".join(parts)


def _attempt(attempt: Values) -> str:
    took = f" after {duration(attempt['seconds'])}" if "seconds" in attempt else ""
    answer = f", answered: {attempt['answer']}" if "answer" in attempt else ""
    return f"last attempt {duration(attempt['seconds_ago'])} ago: {attempt['code']}{took}{answer}"


def _state(sink: Values, shard: int | None) -> str:
    match sink["state"]:
        case "not routed":
            return "not routed: no pattern at that time matched its type"
        case "delivered":
            return _delivered(sink)
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
            return _row_state(sink)


def _row_state(sink: Values) -> str:
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


def _delivered(found: Values) -> str:
    parts = [f"delivered {found['at']} by relay {found['relay']}", f"attempt {found['attempt']}"]
    parts += [f"status {found['status']}"] if "status" in found else []
    parts += [f"took {_took(found) or '-'}"] if "milliseconds" in found else []
    return ", ".join([*parts, *_place(found)])


def _owner(sink: Values) -> str:
    if sink["owner"] is None:
        return "which no relay owns"
    return f"owned by {sink['owner']}, leased for another {duration(sink['lease_seconds'])}"


def _behind(sink: Values) -> str:
    if sink["behind"] is None:
        return ""
    return f", behind {'the dead letter ' if sink['behind_state'] == 'dead' else ''}{sink['behind']} of its key"


def _due(sink: Values) -> str:
    return f"in {duration(sink['due_in_seconds'])}" if sink["due_in_seconds"] else "now"


# -- doctor -----------------------------------------------------------------------------------------------------------


def findings_text(findings: Sequence[Finding]) -> str:
    """Render findings in paragraphs."""
    lines: list[str] = []
    for each in findings:
        lines += [
            f"{each.severity.upper()}  {each.summary}",
            f"  {each.evidence}",
            f"  do: {each.advice} ({each.runbook})",
            *(f"  sql: {statement}" for statement in each.statements if statement.isprintable()),
            "",
        ]
    if all(finding.severity == "ok" for finding in findings):
        lines.append("nothing else was found" if findings else "no problems found")
    return joined(lines)
