"""Commands on sinks: list, remove, seek, probe."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.arguments import moment, text
from outbox_relay.cli.command import add_command, add_group, query, show
from outbox_relay.cli.confirmation import actor, add_reason, add_yes, confirmed
from outbox_relay.cli.output import DONE, FAILED, say

if TYPE_CHECKING:
    from outbox_relay.admin.sinks import Removal, Seek

UNCHANGED = "nothing was changed"


def add(commands: Any) -> None:
    """Add the commands of this module."""
    actions = add_group(commands, "sinks", "list, remove, seek and probe sinks")
    listed = add_command(actions, "list", _list, "show all sinks, and the relays that have them in their settings")
    removed = add_command(actions, "remove", _remove, "remove a sink, with its rows and positions")
    _add_sink(removed)
    removed.add_argument("--forget", action="store_true", help="let relays register the name again")
    sought = add_command(actions, "seek", _seek, "move a sink to another position in the log")
    _add_sink(sought)
    sought.add_argument(
        "--to", type=_place, metavar="now|beginning|T", required=True,
        help="the end or the beginning of the log, or the first event emitted at or after a time or within an age",
    )  # fmt: skip
    probed = add_command(actions, "probe", _probe, "probe the destination of a sink now, while its circuit is open")
    _add_sink(probed)
    for parser in (removed, sought, probed):
        add_reason(parser)
    for parser in (removed, sought):
        add_yes(parser)
    for parser in (listed, removed, sought, probed):
        parser.add_argument("--json", action="store_true", help="print JSON")


def _add_sink(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sink", type=text, metavar="SINK", help="its name")


def _place(value: str) -> str:
    return value if value in {"now", "beginning"} else moment(value)


def _list(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import sinks, sinks_text

    show(arguments, sinks.sinks, sinks_text)
    return DONE


def _remove(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import sinks

    name = arguments.sink
    if not arguments.forget or not _is_former(arguments):
        lost = query(arguments, lambda store: sinks.removal(store, name))
        if lost is None:
            return _done(arguments, 0, f"sink {name} is already removed")
        if not confirmed(arguments, _removal_question(name, lost)):
            return _declined()
    done = query(
        arguments,
        lambda store: sinks.remove(store, name, forget=arguments.forget, progress=_progress, **_by(arguments)),
    )
    if not done.removed:
        return _done(arguments, done.deliveries, f"the name {name} is forgotten: a relay can register it again")
    kept = "" if arguments.forget else "; its name stays reserved until you run remove --forget"
    return _done(arguments, done.deliveries, f"sink {name} is removed, with {_count(done.deliveries, 'row')}{kept}")


def _is_former(arguments: argparse.Namespace) -> bool:
    from outbox_relay.admin import sinks

    found = query(arguments, sinks.sinks)
    return any(each["name"] == arguments.sink for each in found["former"])


def _removal_question(name: str, lost: Removal) -> str:
    least = "" if lost.exact else "at least "
    question = (
        f"Remove sink {name}, with {least}{_count(lost.deliveries, 'row')}? "
        f"{least.capitalize()}{_count(lost.undelivered, 'event')} will not be delivered."
    )
    if lost.relays:
        question += f" In the settings of live relays: {', '.join(lost.relays)}; these will not be ready."
    return question


def _progress(rows: int) -> None:
    if sys.stderr.isatty():
        say(f"{_count(rows, 'row')} deleted")


def _by(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"actor": actor(), "reason": arguments.reason}


def _declined() -> int:
    say(UNCHANGED)
    return FAILED


def _seek(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import sinks

    name, to = arguments.sink, arguments.to
    found = query(arguments, lambda store: sinks.preview_seek(store, name, to))
    effect = _effect(found)
    if not confirmed(arguments, f"Seek sink {name}? {effect}"):
        return _declined()
    query(arguments, lambda store: sinks.seek(store, name, to, **_by(arguments)))
    return _done(arguments, found.again + found.passed_over, f"sink {name} moved. {effect}")


def _probe(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import sinks

    name = arguments.sink
    obstacle = query(arguments, lambda store: sinks.probe(store, name, **_by(arguments)))
    return _done(arguments, int(obstacle is None), sinks.probe_text(name, obstacle))


def _effect(found: Seek) -> str:
    about = "About" if found.exact else "At least"
    effect = f"{about} {_count(found.again, 'event')} will be delivered again, and {found.passed_over} passed over."
    if found.dead:
        effect += f" Of those delivered again, {found.dead} are dead letters, which stay as they are."
    if found.discarded:
        effect += f" Discarded before, and not delivered again: {found.discarded:,}."
    return effect


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _done(arguments: argparse.Namespace, done: int, said: str) -> int:
    print(json.dumps({"done": done, "left": 0}) if arguments.json else said)
    return DONE
