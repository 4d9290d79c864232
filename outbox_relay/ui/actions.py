"""The actions of operators: the fields of each, its dry run, and what does it. Each leaves a row of the audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypedDict

from outbox_relay import admin
from outbox_relay.admin import replays, schedules, sinks
from outbox_relay.admin.actions import require_sink
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.postgres.store import Store
from outbox_relay.ui import forms
from outbox_relay.ui.delivery_views import count_matching
from outbox_relay.ui.jobs import Report

RATE_MOST: Final = 1_000_000
REPLAY_MOST: Final = 10**18 - 1
DELIVERY_NAMES: Final = (*forms.FILTER_NAMES, forms.AS_OF, forms.COUNTED)
REPLAY_FILTER: Final = ("sink", "type", "tenant", "since", "until", "uid", "key")

Fields = Mapping[str, str]


class Input(NamedTuple):
    """A field that a person fills in before the action can be planned."""

    name: str
    label: str
    value: str
    placeholder: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The effects that an action would have. It is only ``possible`` if there is something to do.

    ``fields`` are those with which it is asked for, and ``back`` is the path of the page that it is about.
    """

    title: str
    verb: str
    back: str
    effects: Sequence[str] = ()
    possible: bool = True
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: Sequence[Input] = ()
    reason_required: bool = False
    danger: bool = False


class By(TypedDict):
    """The person who acts, as the audit names them, and their reason."""

    actor: str
    reason: str | None


class Action(NamedTuple):
    """An action: the fields that it has, its dry run, and what does it, which returns a sentence about the result."""

    names: Sequence[str]
    plan: Callable[[Store, Fields], Plan]
    run: Callable[[Store, Fields, By, Report], str]


# -- one sink, schedule or replay -------------------------------------------------------------------------------------


def _on_one(
    kind: str,
    verb: str,
    effects: Callable[[Store, str], tuple[Sequence[str], bool]],
    do: Callable[[Store, str, By], str],
    *,
    danger: bool = False,
) -> Action:
    """Return an action on what one field names. ``effects`` says also whether there is something to do."""
    name_field = "id" if kind == "replay" else kind

    def plan(store: Store, fields: Fields) -> Plan:
        name = fields.get(name_field, "").strip()
        lines, possible = effects(store, name)
        title = f"{verb.split(maxsplit=1)[0]} {kind} {name}"
        back = f"/sinks/{name}" if kind == "sink" else f"/{kind}s"
        return Plan(title, verb, back, lines, possible, {name_field: name}, danger=danger)

    def run(store: Store, fields: Fields, by: By, _report: Report) -> str:
        return do(store, fields.get(name_field, "").strip(), by)

    return Action((name_field,), plan, run)


def _pausing(store: Store, sink: str) -> tuple[Sequence[str], bool]:
    require_sink(store, sink)
    return (
        "Every relay stops delivering to this sink within two seconds, and finishes what is under way.",
        "Its events stay in the log until it is resumed. While it is paused, the days that it has not read are kept.",
    ), True


def _pause(store: Store, sink: str, by: By) -> str:
    return f"sink {sink} {'is paused' if admin.pause(store, sink, **by) else 'was paused already'}"


def _resuming(store: Store, sink: str) -> tuple[Sequence[str], bool]:
    require_sink(store, sink)
    return ("Relays deliver to this sink again, from its position on.",), True


def _resume(store: Store, sink: str, by: By) -> str:
    return f"sink {sink} {'is resumed' if admin.resume(store, sink, **by) else 'was not paused'}"


def _probing(store: Store, sink: str) -> tuple[Sequence[str], bool]:
    obstacle = sinks.probe_obstacle(store, sink)
    text = sinks.probe_text(sink, obstacle)
    effects = [f"{text[0].upper()}{text[1:]}."]
    if obstacle is None:
        effects.append("If that one fails, they wait as long as after any probe that fails.")
    return effects, obstacle is None


def _probe(store: Store, sink: str, by: By) -> str:
    return sinks.probe_text(sink, sinks.probe(store, sink, **by))


def _running(store: Store, name: str) -> tuple[Sequence[str], bool]:
    found = schedules.schedule(store, name)
    failed = [] if found["error"] is None else [f"Its last try failed: {found['error']}"]
    return (
        f"An event of type {found['type']} is emitted now, with the present time in its header.",
        "The times of the schedule stay as they are.",
        *failed,
    ), True


def _run(store: Store, name: str, by: By) -> str:
    return f"event {schedules.run(store, name, **by)} is emitted"


def _schedule_change(change: str, *effects: str) -> Action:
    state = schedules.STATE_AFTER[change]

    def changing(store: Store, name: str) -> tuple[Sequence[str], bool]:
        found = schedules.schedule(store, name)
        if found["state"] == state:
            return (f"It is {state} already.",), False
        if change != "remove" or not (relays := schedules.relays_with(store, name)):
            return effects, True
        again = "Relays that have it in their files register it again when they start or reload"
        return (*effects, f"{again}: {', '.join(relays)}."), True

    def do(store: Store, name: str, by: By) -> str:
        changed = schedules.change(store, name, change, **by)
        return f"schedule {name} {'is' if changed else 'was'} {state}{'' if changed else ' already'}"

    return _on_one("schedule", change.capitalize(), changing, do, danger=change == "remove")


def _replay_change(change: str, effect: str) -> Action:
    def changing(store: Store, number: str) -> tuple[Sequence[str], bool]:
        found = replays.replay(store, _number(number))
        return (f"It is {found['state']}, with {found['delivered']:,} events delivered.", effect), True

    def do(store: Store, number: str, by: By) -> str:
        was = replays.change(store, _number(number), change, **by)
        return f"replay {number} {f'is {replays.STATE_AFTER[change]}' if was is None else f'was {was} already'}"

    return _on_one("replay", f"{change.capitalize()} replay", changing, do, danger=change == "cancel")


def _number(text: str) -> int:
    return forms.read_integer("id", text, 1, REPLAY_MOST)


# -- seek -------------------------------------------------------------------------------------------------------------


def _plan_seek(store: Store, fields: Fields) -> Plan:
    sink, to = fields.get("sink", "").strip(), fields.get("to", "").strip()
    require_sink(store, sink)
    place = Input("to", "To", to, "now, beginning, 2h or 2026-11-23T08:00:00Z", required=True)
    plan = Plan(f"Seek sink {sink}", "Seek", f"/sinks/{sink}", inputs=[place], possible=False, danger=True)
    if not to:
        return plan
    found = sinks.preview_seek(store, sink, _place(to))
    least = "About" if found.exact else "At least"
    effects = [f"{least} {found.again:,} events will be delivered again, and {found.passed_over:,} passed over."]
    if found.dead:
        effects.append(f"{found.dead:,} of those delivered again are dead letters, which stay as they are.")
    if found.discarded:
        effects.append(f"{found.discarded:,} were discarded before, and are not delivered again.")
    return replace(plan, effects=effects, possible=True, fields={"sink": sink, "to": to})


def _seek(store: Store, fields: Fields, by: By, _report: Report) -> str:
    sink, to = fields.get("sink", ""), fields.get("to", "").strip()
    sinks.seek(store, sink, _place(to), **by)
    return f"sink {sink} was moved to {to}"


def _place(value: str) -> str:
    try:
        return value if value in {"now", "beginning"} else forms.read_time("to", value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}, now or beginning") from None


# -- deliveries -------------------------------------------------------------------------------------------------------


def _deliveries(
    verb: str, states: Sequence[str], effect: str, do: Callable[[Store, Fields, Mapping[str, Any], By, Report], str]
) -> Action:
    """Return an action on the deliveries in one of ``states`` that a filter selects."""

    def plan(store: Store, fields: Fields) -> Plan:
        kept = {name: fields[name] for name in forms.FILTER_NAMES if fields.get(name)}
        kept |= {name: fields[name] for name in forms.MAY_BE_EMPTY if name in fields}
        if not kept:
            raise ConfigurationError(f"name what to {verb.lower()}, such as state: {states[0]}")
        wanted = forms.read_filter(fields, states)
        matched, [state] = count_matching(store, wanted), wanted["states"]
        _refuse_more(fields, matched, state)
        is_one = matched.exact and matched.count == 1
        empty = {forms.KIND: "no error", "key": "the empty one"}
        selected = [f"{name}: {value or empty[name]}" for name, value in kept.items() if name != "state"]
        effects = (
            f"{matched} {state} {'delivery matches' if is_one else 'deliveries match'}.",
            f"Selected by {'; '.join(selected)}." if selected else "All sinks, all types.",
            effect,
        )
        is_event = forms.is_uid(kept.get("uid", ""))
        back = f"/events/{kept['uid']}" if is_event else f"/exceptions?{forms.filter_query(fields)}"
        kept |= {forms.AS_OF: matched.at, **({forms.COUNTED: str(matched.count)} if matched.exact else {})}
        kept |= {"rate": fields["rate"]} if fields.get("rate") else {}
        return Plan(
            f"{verb} {state} deliveries", f"{verb} {matched}", back, effects, matched.count > 0 or not matched.exact,
            kept, reason_required=verb == "Discard", danger=verb == "Discard",
        )  # fmt: skip

    def run(store: Store, fields: Fields, by: By, report: Report) -> str:
        return do(store, fields, forms.read_filter(fields, states), by, report)

    return Action((*DELIVERY_NAMES, "rate") if verb == "Retry" else DELIVERY_NAMES, plan, run)


def _refuse_more(fields: Fields, matched: admin.Matched, state: str) -> None:
    """Raise ``ConfigurationError`` if more deliveries match than the dry run has counted."""
    if not fields.get(forms.COUNTED):
        return
    counted = forms.read_integer(forms.COUNTED, fields[forms.COUNTED], 0, 10**18 - 1)
    if matched.count > counted:
        raise ConfigurationError(
            f"{matched} {state} deliveries match now, and {counted:,} were counted before: nothing was changed. "
            "Look again at what it will do"
        )


def _retry(store: Store, fields: Fields, wanted: Mapping[str, Any], by: By, report: Report) -> str:
    return _result("retried", admin.retry_deliveries(store, wanted, report=report, rate=_rate(fields), **by))


def _discard(store: Store, _fields: Fields, wanted: Mapping[str, Any], by: By, report: Report) -> str:
    if by["reason"] is None:
        raise ConfigurationError("a discard needs a reason, which why shows")
    result = admin.discard_deliveries(store, wanted, report=report, actor=by["actor"], reason=by["reason"])
    return _result("discarded", result)


def _rate(fields: Fields) -> int | None:
    return forms.read_integer("rate", fields["rate"], 1, RATE_MOST) if fields.get("rate") else None


def _result(done: str, result: admin.Result) -> str:
    parts = [f"{result.done:,} {done}"]
    if result.under_way:
        parts.append(f"{result.under_way:,} left because they are being delivered now")
    if result.unsettled:
        parts.append(f"{result.unsettled:,} left because the position of their shard is before them")
    if result.stalled:
        parts.append(f"stopped with {result.unvisited:,} left, because the sink delivers none that are due")
    return "; ".join(parts)


# -- starting a replay ------------------------------------------------------------------------------------------------


def _replay_filter(fields: Fields) -> dict[str, Any]:
    wanted = forms.read_filter({name: fields[name] for name in REPLAY_FILTER if name in fields})
    del wanted["states"]
    return wanted


def _plan_replay(store: Store, fields: Fields) -> Plan:
    kept = {name: fields[name].strip() for name in (*REPLAY_FILTER, "to", "rate") if fields.get(name, "").strip()}
    kept |= {name: fields[name] for name in forms.EXACT if fields.get(name)}
    kept |= {"key": fields["key"]} if "key" in fields else {}
    texts = (
        ("sink", "Sink", ""), ("type", "Type", "order.*"), ("tenant", "Tenant", ""), ("since", "Since", "2h, needed"),
        ("until", "Until", ""), ("to", "To another sink", ""), ("rate", "Events a second", "no limit"),
    )  # fmt: skip
    inputs = [Input(name, label, kept.get(name, ""), text, required=name == "sink") for name, label, text in texts]
    title = "Deliver an event again" if "uid" in kept else "Start a replay"
    if "sink" not in kept or not kept.keys() & {"since", "uid", "key"}:
        return Plan(title, "Start", "/replays", inputs=inputs, possible=False)
    _rate(kept)
    found = replays.preview(store, _replay_filter(kept), kept.get("to"))
    return Plan(
        title, "Deliver again", "/replays", _replay_effects(found, kept["sink"], kept.get("to")),
        found.matched > 0 or not found.exact, kept, inputs,
    )  # fmt: skip


def _replay_effects(found: replays.Preview, sink: str, to: str | None) -> list[str]:
    least = "" if found.exact else "at least "
    lines = [f"{least}{found.matched:,} events that sink {sink} has passed will be delivered to {to or sink} again."]
    lines += [f"There is no event {uid} in the log." for uid in found.unknown]
    if found.oldest is not None:
        lines.append(f"The log begins at {found.oldest.isoformat()}: earlier events are not in it.")
    if found.unrouted:
        lines.append(f"Sink {sink} has no route for {', '.join(found.unrouted[:10])}.")
    if found.paused:
        lines.append(f"Sink {to or sink} is paused: the replay waits until it is resumed.")
    elif not found.relays:
        lines.append(f"No relay serves sink {to or sink}: the replay waits for one.")
    return lines


def _replay(store: Store, fields: Fields, by: By, _report: Report) -> str:
    number = replays.start(store, _replay_filter(fields), fields.get("to") or None, _rate(fields), **by)
    return f"replay {number} has started"


ACTIONS: Final[Mapping[str, Action]] = {
    "pause": _on_one("sink", "Pause", _pausing, _pause),
    "resume": _on_one("sink", "Resume", _resuming, _resume),
    "probe": _on_one("sink", "Probe now", _probing, _probe),
    "seek": Action(("sink", "to"), _plan_seek, _seek),
    "retry": _deliveries(
        "Retry", ("dead", "waiting"), "They become due now, each key in its order. Attempts count from 0.", _retry
    ),
    "discard": _deliveries(
        "Discard", admin.STATES, "They will never be delivered, unless a replay delivers them.", _discard
    ),
    "replay": Action((*REPLAY_FILTER, "to", "rate"), _plan_replay, _replay),
    "replay-pause": _replay_change("pause", "Relays deliver no more of its events until it is resumed."),
    "replay-resume": _replay_change("resume", "Relays deliver the rest of its events."),
    "replay-cancel": _replay_change("cancel", "The rest of its events is not delivered. What was delivered stays so."),
    "schedule-run": _on_one("schedule", "Run now", _running, _run),
    "schedule-pause": _schedule_change(
        "pause",
        "No relay fires it until it is resumed. Times that pass meanwhile are not missed: no event is for them.",
    ),
    "schedule-resume": _schedule_change("resume", "Relays fire it again, from its first time after now on."),
    "schedule-remove": _schedule_change(
        "remove", "No relay fires it any more. Events that it has emitted stay as they are."
    ),
}
"""The actions by the last part of their path."""
