"""Commands on schedules: list, run, pause, resume, remove."""

from __future__ import annotations

import argparse
import json
from typing import Any

from outbox_relay.cli.arguments import text
from outbox_relay.cli.command import add_command, add_group, query, show
from outbox_relay.cli.confirmation import actor, add_reason
from outbox_relay.cli.output import DONE, say


def add(commands: Any) -> None:
    """Add the commands of this module."""
    actions = add_group(commands, "schedules", "list, run, pause, resume and remove schedules")
    listed = add_command(actions, "list", _list, "show all schedules, with their last and next times")
    run = add_command(actions, "run", _run, "emit the event of a schedule now; print its uid")
    pause = add_command(actions, "pause", _change, "pause a schedule on all relays")
    resume = add_command(actions, "resume", _change, "resume a paused schedule with its first time after now")
    remove = add_command(actions, "remove", _change, "remove a schedule that no file has any more")
    for parser in (run, pause, resume, remove):
        parser.add_argument("name", type=text, metavar="NAME", help="its name")
        add_reason(parser)
    for parser in (listed, run, pause, resume, remove):
        parser.add_argument("--json", action="store_true", help="print JSON")


def _list(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import schedules, schedules_text

    show(arguments, schedules.schedules, schedules_text, lambda found: {"schedules": found})
    return DONE


def _run(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import schedules

    uid = query(arguments, lambda store: schedules.run(store, arguments.name, **_by(arguments)))
    print(json.dumps({"uid": str(uid)}) if arguments.json else uid)
    return DONE


def _change(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import schedules

    name, action = arguments.name, arguments.action

    def change(store: Any) -> tuple[bool, list[str]]:
        changed = schedules.change(store, name, action, **_by(arguments))
        return changed, schedules.relays_with(store, name) if action == "remove" else []

    changed, relays = query(arguments, change)
    state = schedules.STATE_AFTER[action]
    if arguments.json:
        print(json.dumps({"done": int(changed), "left": 0}))
    else:
        print(f"schedule {name} is {state}" if changed else f"schedule {name} was {state} already: nothing to do")
    if relays:
        say(f"relays that have {name} in their files register it again when they start or reload: {', '.join(relays)}")
    return DONE


def _by(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"actor": actor(), "reason": arguments.reason}
