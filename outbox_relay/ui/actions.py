"""The actions of operators. Each has a dry run, and leaves a row of the audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from outbox_relay import admin
from outbox_relay.admin import replays, sinks
from outbox_relay.admin.actions import require_sink
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.times import read_moment
from outbox_relay.postgres.store import Store
from outbox_relay.ui import forms
from outbox_relay.ui.jobs import Report
from outbox_relay.ui.plans import Action, By, Fields, Input, Plan
from outbox_relay.ui.schedule_actions import SCHEDULE_ACTIONS
from outbox_relay.ui.view_events import count_matching

RATE_MOST: Final = 1_000_000
REPLAY_MOST: Final = 10**18 - 1
DELIVERY_NAMES: Final = (*forms.FILTER_NAMES, forms.AS_OF, forms.COUNTED)
REPLAY_NAMES: Final = ("sink", "type", "tenant", "since", "until", "to", "rate", "uid", "key")


# -- sinks ------------------------------------------------------------------------------------------------------------


def _plan_pause(store: Store, fields: Fields) -> Plan:
    sink = _sink(store, fields)
    effects = [
        "Every relay stops delivering to this sink within two seconds, and finishes what is under way.",
        "Its events stay in the log until it is resumed. While it is paused, the days that it has not read are kept.",
    ]
    return Plan(f"Pause sink {sink}", "Pause", f"/sinks/{sink}", effects, fields={"sink": sink})


def _pause(store: Store, fields: Fields, by: By, _report: Report) -> str:
    sink = fields.get("sink", "")
    changed = admin.pause(store, sink, **by._asdict())
    return f"sink {sink} is paused" if changed else f"sink {sink} was paused already"


def _plan_resume(store: Store, fields: Fields) -> Plan:
    sink = _sink(store, fields)
    effects = ["Relays deliver to this sink again, from its position on."]
    return Plan(f"Resume sink {sink}", "Resume", f"/sinks/{sink}", effects, fields={"sink": sink})


def _resume(store: Store, fields: Fields, by: By, _report: Report) -> str:
    sink = fields.get("sink", "")
    changed = admin.resume(store, sink, **by._asdict())
    return f"sink {sink} is resumed" if changed else f"sink {sink} was not paused"


def _plan_probe(store: Store, fields: Fields) -> Plan:
    sink = fields.get("sink", "").strip()
    obstacle = sinks.probe_obstacle(store, sink)
    effect = f"{sinks.probe_text(sink, obstacle)}."
    effects = [effect[0].upper() + effect[1:]]
    if obstacle is None:
        effects.append("If that one fails, they wait as long as after any probe that fails.")
    return Plan(
        f"Probe sink {sink}", "Probe now", f"/sinks/{sink}", effects, possible=obstacle is None, fields={"sink": sink}
    )


def _probe(store: Store, fields: Fields, by: By, _report: Report) -> str:
    sink = fields.get("sink", "").strip()
    return sinks.probe_text(sink, sinks.probe(store, sink, actor=by.actor, reason=by.reason))


def _plan_seek(store: Store, fields: Fields) -> Plan:
    sink, to = _sink(store, fields), fields.get("to", "").strip()
    wanted = Input("to", "To", to, "now, beginning, 2h or 2026-11-23T08:00:00Z", required=True)
    plan = Plan(f"Seek sink {sink}", "Seek", f"/sinks/{sink}", inputs=[wanted], possible=False, danger=True)
    if not to:
        return plan
    found = sinks.preview_seek(store, sink, _place(to))
    least = "About" if found.exact else "At least"
    effects = [f"{least} {found.again:,} events will be delivered again, and {found.passed_over:,} passed over."]
    if found.dead:
        effects.append(f"{found.dead:,} of those delivered again are dead letters, which stay as they are.")
    if found.discarded:
        effects.append(f"{found.discarded:,} were discarded before, and are not delivered again.")
    return Plan(
        plan.title, plan.verb, plan.back, effects, fields={"sink": sink, "to": to}, inputs=plan.inputs, danger=True
    )


def _seek(store: Store, fields: Fields, by: By, _report: Report) -> str:
    sink, to = fields.get("sink", ""), fields.get("to", "").strip()
    sinks.seek(store, sink, _place(to), actor=by.actor, reason=by.reason)
    return f"sink {sink} was moved to {to}"


def _place(value: str) -> str:
    try:
        return value if value in {"now", "beginning"} else read_moment(value)
    except ValueError as error:
        raise ConfigurationError(f"to {error}, now or beginning") from None


def _sink(store: Store, fields: Fields) -> str:
    """Return the sink that the fields name. Raises ``NotFound``, which names the nearest."""
    sink = fields.get("sink", "").strip()
    require_sink(store, sink)
    return sink


# -- deliveries -------------------------------------------------------------------------------------------------------


def _plan_retry(store: Store, fields: Fields) -> Plan:
    return _plan_deliveries(
        store,
        fields,
        "Retry",
        ("dead", "waiting"),
        "They become due now, each key in its order. Attempts count from 0.",
    )


def _plan_discard(store: Store, fields: Fields) -> Plan:
    return _plan_deliveries(
        store, fields, "Discard", admin.STATES, "They will never be delivered, unless a replay delivers them."
    )


def _plan_deliveries(store: Store, fields: Fields, verb: str, states: Sequence[str], effect: str) -> Plan:
    kept = {name: fields[name] for name in forms.FILTER_NAMES if fields.get(name)}
    kept |= {name: fields[name] for name in (forms.KIND, "key") if name in fields}
    if not kept:
        raise ConfigurationError(f"name what to {verb.lower()}, such as state: {states[0]}")
    wanted = forms.read_filter(fields, states)
    matched = count_matching(store, wanted)
    state, number = wanted["states"][0], matched.count
    _refuse_more(fields, matched, state)
    found = f"{matched} {state} {'delivery matches' if number == 1 and matched.exact else 'deliveries match'}."
    empty = {forms.KIND: "no error", "key": "the empty one"}
    selected = [f"{name}: {value or empty[name]}" for name, value in kept.items() if name != "state"]
    scope = [f"Selected by {'; '.join(selected)}."] if selected else ["All sinks, all types."]
    back = (
        f"/events/{kept['uid']}" if forms.is_uid(kept.get("uid", "")) else f"/exceptions?{forms.filter_query(fields)}"
    )
    kept |= {"rate": fields["rate"]} if fields.get("rate") else {}
    return Plan(
        f"{verb} {state} deliveries", f"{verb} {matched}", back, [found, *scope, effect], fields=kept | _bound(matched),
        possible=number > 0 or not matched.exact, reason_required=verb == "Discard", danger=verb == "Discard",
    )  # fmt: skip


def _bound(matched: admin.Matched) -> dict[str, str]:
    """Return the fields that keep an action to the deliveries that its dry run has counted."""
    return {forms.AS_OF: matched.at, **({forms.COUNTED: str(matched.count)} if matched.exact else {})}


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


def _retry(store: Store, fields: Fields, by: By, report: Report) -> str:
    wanted = forms.read_filter(fields, ("dead", "waiting"))
    rate = forms.read_integer("rate", fields["rate"], 1, RATE_MOST) if fields.get("rate") else None
    result = admin.retry_deliveries(store, wanted, report=report, rate=rate, actor=by.actor, reason=by.reason)
    return _result("retried", result)


def _discard(store: Store, fields: Fields, by: By, report: Report) -> str:
    if by.reason is None:
        raise ConfigurationError("a discard needs a reason, which why shows")
    wanted = forms.read_filter(fields, admin.STATES)
    result = admin.discard_deliveries(store, wanted, report=report, actor=by.actor, reason=by.reason)
    return _result("discarded", result)


def _result(done: str, result: admin.Result) -> str:
    parts = [f"{result.done:,} {done}"]
    if result.under_way:
        parts.append(f"{result.under_way:,} left because they are being delivered now")
    if result.unsettled:
        parts.append(f"{result.unsettled:,} left because the position of their shard is before them")
    if result.stalled:
        parts.append(f"stopped with {result.unvisited:,} left, because the sink delivers none that are due")
    return "; ".join(parts)


# -- replays ----------------------------------------------------------------------------------------------------------


def _replay_filter(fields: Fields) -> tuple[dict[str, Any], str | None, int | None]:
    """Return filter, other sink and rate of a replay. Raises ``ConfigurationError``."""
    names = ("sink", "type", "tenant", "since", "until", "uid", "key")
    wanted = forms.read_filter({name: fields[name] for name in names if name in fields})
    del wanted["states"]
    rate = forms.read_integer("rate", fields["rate"], 1, RATE_MOST) if fields.get("rate") else None
    return wanted, fields.get("to") or None, rate


def _plan_replay(store: Store, fields: Fields) -> Plan:
    kept = {name: fields[name].strip() for name in REPLAY_NAMES if fields.get(name, "").strip()}
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
    wanted, to, _ = _replay_filter(kept)
    found = replays.preview(store, wanted, to)
    return Plan(
        title, "Deliver again", "/replays", _replay_effects(found, kept["sink"], to), fields=kept, inputs=inputs,
        possible=found.matched > 0 or not found.exact,
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
    wanted, to, rate = _replay_filter(fields)
    number = replays.start(store, wanted, to, rate, actor=by.actor, reason=by.reason)
    return f"replay {number} has started"


def _change_replay(change: str, effect: str) -> Action:
    def plan(store: Store, fields: Fields) -> Plan:
        number = _number(fields)
        found = replays.replay(store, number)
        effects = [f"It is {found['state']}, with {found['delivered']:,} events delivered.", effect]
        title = f"{change.capitalize()} replay {number}"
        return Plan(title, title, "/replays", effects, fields={"id": str(number)}, danger=change == "cancel")

    def run(store: Store, fields: Fields, by: By, _report: Report) -> str:
        number = _number(fields)
        was = replays.change(store, number, change, actor=by.actor, reason=by.reason)
        return (
            f"replay {number} is {replays.STATE_AFTER[change]}" if was is None else f"replay {number} was {was} already"
        )

    return Action(("id",), plan, run)


def _number(fields: Fields) -> int:
    return forms.read_integer("id", fields.get("id", ""), 1, REPLAY_MOST)


ACTIONS: Final[Mapping[str, Action]] = {
    "pause": Action(("sink",), _plan_pause, _pause),
    "resume": Action(("sink",), _plan_resume, _resume),
    "probe": Action(("sink",), _plan_probe, _probe),
    "seek": Action(("sink", "to"), _plan_seek, _seek),
    "retry": Action((*DELIVERY_NAMES, "rate"), _plan_retry, _retry),
    "discard": Action(DELIVERY_NAMES, _plan_discard, _discard),
    "replay": Action(REPLAY_NAMES, _plan_replay, _replay),
    "replay-pause": _change_replay("pause", "Relays deliver no more of its events until it is resumed."),
    "replay-resume": _change_replay("resume", "Relays deliver the rest of its events."),
    "replay-cancel": _change_replay("cancel", "The rest of its events is not delivered. What was delivered stays so."),
    **SCHEDULE_ACTIONS,
}
"""The actions by the last part of their path."""
