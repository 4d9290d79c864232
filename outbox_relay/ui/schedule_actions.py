"""The actions on schedules: run, pause, resume, remove. Each has a dry run, and leaves a row of the audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox_relay.admin import schedules
from outbox_relay.postgres.store import Store
from outbox_relay.ui.jobs import Report
from outbox_relay.ui.plans import Action, By, Fields, Plan

BACK: Final = "/schedules"


def _name(fields: Fields) -> str:
    return fields.get("schedule", "").strip()


def _plan_run(store: Store, fields: Fields) -> Plan:
    found = schedules.schedule(store, _name(fields))
    effects = [
        f"An event of type {found['type']} is emitted now, with the present time in its header.",
        "The times of the schedule stay as they are.",
    ]
    if found["error"] is not None:
        effects.append(f"Its last try failed: {found['error']}")
    return Plan(f"Run schedule {found['name']}", "Run now", BACK, effects, fields={"schedule": found["name"]})


def _run(store: Store, fields: Fields, by: By, _report: Report) -> str:
    uid = schedules.run(store, _name(fields), **by._asdict())
    return f"event {uid} is emitted"


def _effects(store: Store, found: Mapping[str, Any], change: str) -> list[str]:
    """Return the effects of a change of a schedule. There is none if it is in the wanted state already."""
    if found["state"] == schedules.STATE_AFTER[change]:
        return []
    match change:
        case "pause":
            return [
                "No relay fires it until it is resumed. Times that pass meanwhile are not missed: no event is for them."
            ]
        case "resume":
            return ["Relays fire it again, from its first time after now on."]
        case _:
            relays = schedules.relays_with(store, found["name"])
            gone = "No relay fires it any more. Events that it has emitted stay as they are."
            again = (
                f"Relays that have it in their files register it again when they start or reload: {', '.join(relays)}."
            )
            return [gone, again] if relays else [gone]


def _change(change: str) -> Action:
    def plan(store: Store, fields: Fields) -> Plan:
        found = schedules.schedule(store, _name(fields))
        effects = _effects(store, found, change)
        return Plan(
            f"{change.capitalize()} schedule {found['name']}", change.capitalize(), BACK,
            effects or [f"It is {found['state']} already."], possible=bool(effects), fields={"schedule": found["name"]},
            danger=change == "remove",
        )  # fmt: skip

    def run(store: Store, fields: Fields, by: By, _report: Report) -> str:
        name, state = _name(fields), schedules.STATE_AFTER[change]
        changed = schedules.change(store, name, change, **by._asdict())
        return f"schedule {name} is {state}" if changed else f"schedule {name} was {state} already"

    return Action(("schedule",), plan, run)


SCHEDULE_ACTIONS: Final[Mapping[str, Action]] = {
    "schedule-run": Action(("schedule",), _plan_run, _run),
    **{f"schedule-{change}": _change(change) for change in schedules.STATE_AFTER},
}
"""The actions by the last part of their path."""
