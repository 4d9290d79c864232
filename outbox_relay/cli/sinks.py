"""Commands on sinks: pause, resume, and the group sinks with list, remove, seek, probe."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.arguments import moment
from outbox_relay.cli.command import add_command, add_group, by, confirmed, counted, print_done, query, show
from outbox_relay.cli.output import DONE, FAILED, say

if TYPE_CHECKING:
    from outbox_relay.admin.sinks import Removal, Seek

OBEYED = "paused; relays start no new deliveries after about 2 s and finish those in flight"
"""Relays look for a pause every second."""


def add(commands: Any) -> None:
    """Add the commands of this module."""
    add_command(commands, "pause", _pause, "pause a sink on all relays, until resume", "json", "reason", "sink")
    add_command(commands, "resume", _resume, "resume a paused sink", "json", "reason", "sink")
    actions = add_group(commands, "sinks", "list, remove, seek and probe sinks")
    add_command(actions, "list", _list, "show all sinks, and the relays that have them in their settings", "json")
    about = "remove a sink, with its rows and positions"
    removed = add_command(actions, "remove", _remove, about, "json", "reason", "yes", "sink")
    removed.add_argument("--forget", action="store_true", help="let relays register the name again")
    about = "move a sink to another position in the log"
    sought = add_command(actions, "seek", _seek, about, "json", "reason", "yes", "sink")
    sought.add_argument(
        "--to", type=_place, metavar="now|beginning|T", required=True,
        help="the end or the beginning of the log, or the first event emitted at or after a time or within an age",
    )  # fmt: skip
    about = "probe the destination of a sink now, while its circuit is open"
    add_command(actions, "probe", _probe, about, "json", "reason", "sink")


def _place(value: str) -> str:
    return value if value in {"now", "beginning"} else moment(value)


def _pause(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    changed = query(arguments, lambda store: admin.pause(store, arguments.sink, **by(arguments)))
    state = OBEYED if changed else "already paused"
    return print_done(arguments, int(changed), f"sink {arguments.sink} is {state}")


def _resume(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    changed = query(arguments, lambda store: admin.resume(store, arguments.sink, **by(arguments)))
    return print_done(arguments, int(changed), f"sink {arguments.sink} {'is resumed' if changed else 'was not paused'}")


def _list(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import sinks, sinks_text

    show(arguments, sinks.sinks, sinks_text)
    return DONE


def _remove(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import sinks

    name, forget = arguments.sink, arguments.forget
    former: list[dict[str, Any]] = query(arguments, sinks.sinks)["former"] if forget else []
    if all(each["name"] != name for each in former):
        lost = query(arguments, lambda store: sinks.removal(store, name))
        if lost is None:
            return print_done(arguments, 0, f"sink {name} is already removed")
        if not confirmed(arguments, _removal_question(name, lost)):
            return _declined()
    done = query(arguments, lambda store: sinks.remove(store, name, forget=forget, progress=_progress, **by(arguments)))
    rows = done.deliveries
    if not done.removed:
        return print_done(arguments, rows, f"the name {name} is forgotten: a relay can register it again")
    kept = "" if forget else "; its name stays reserved until you run remove --forget"
    return print_done(arguments, rows, f"sink {name} is removed, with {counted(rows, 'row')}{kept}")


def _removal_question(name: str, lost: Removal) -> str:
    least = "" if lost.exact else "at least "
    question = (
        f"Remove sink {name}, with {least}{counted(lost.deliveries, 'row')}? "
        f"{least.capitalize()}{counted(lost.undelivered, 'event')} will not be delivered."
    )
    if lost.relays:
        question += f" In the settings of live relays: {', '.join(lost.relays)}; these will not be ready."
    return question


def _progress(rows: int) -> None:
    if sys.stderr.isatty():
        say(f"{counted(rows, 'row')} deleted")


def _declined() -> int:
    say("nothing was changed")
    return FAILED


def _seek(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import sinks

    name, to = arguments.sink, arguments.to
    found = query(arguments, lambda store: sinks.preview_seek(store, name, to))
    effect = _effect(found)
    if not confirmed(arguments, f"Seek sink {name}? {effect}"):
        return _declined()
    query(arguments, lambda store: sinks.seek(store, name, to, **by(arguments)))
    return print_done(arguments, found.again + found.passed_over, f"sink {name} moved. {effect}")


def _effect(found: Seek) -> str:
    about = "About" if found.exact else "At least"
    effect = f"{about} {counted(found.again, 'event')} will be delivered again, and {found.passed_over} passed over."
    if found.dead:
        effect += f" Of those delivered again, {found.dead} are dead letters, which stay as they are."
    if found.discarded:
        effect += f" Discarded before, and not delivered again: {found.discarded:,}."
    return effect


def _probe(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import sinks

    name = arguments.sink
    obstacle = query(arguments, lambda store: sinks.probe(store, name, **by(arguments)))
    return print_done(arguments, int(obstacle is None), sinks.probe_text(name, obstacle))
