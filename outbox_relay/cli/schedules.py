"""Commands on schedules: list, run, pause, resume, remove."""

from __future__ import annotations

import argparse
from typing import Any

from outbox_relay.cli.command import add_command, add_group, by, print_done, print_result, query, show
from outbox_relay.cli.output import DONE, say


def add(commands: Any) -> None:
    """Add the commands of this module."""
    actions = add_group(commands, "schedules", "list, run, pause, resume and remove schedules")
    add_command(actions, "list", _list, "show all schedules, with their last and next times", "json")
    for name, do, about in (
        ("run", _run, "emit the event of a schedule now; print its uid"),
        ("pause", _change, "pause a schedule on all relays"),
        ("resume", _change, "resume a paused schedule with its first time after now"),
        ("remove", _change, "remove a schedule that no file has any more"),
    ):
        add_command(actions, name, do, about, "json", "reason", "name")


def _list(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import schedules, schedules_text

    show(arguments, schedules.schedules, schedules_text, "schedules")
    return DONE


def _run(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import schedules

    uid = query(arguments, lambda store: schedules.run(store, arguments.name, **by(arguments)))
    print_result(arguments, {"uid": str(uid)}, str(uid))
    return DONE


def _change(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import schedules

    name, action = arguments.name, arguments.action

    def change(store: Any) -> tuple[bool, list[str]]:
        changed = schedules.change(store, name, action, **by(arguments))
        return changed, schedules.relays_with(store, name) if action == "remove" else []

    changed, relays = query(arguments, change)
    state = schedules.STATE_AFTER[action]
    words = f"is {state}" if changed else f"was {state} already: nothing to do"
    print_done(arguments, int(changed), f"schedule {name} {words}")
    if relays:
        say(f"relays that have {name} in their files register it again when they start or reload: {', '.join(relays)}")
    return DONE
