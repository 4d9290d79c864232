"""Commands on replays: start, list, show, pause, resume, cancel."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.arguments import integer_between, text, uid
from outbox_relay.cli.command import (
    add_command,
    add_group,
    add_period,
    by,
    confirmed,
    counted,
    print_done,
    print_result,
    query,
    read_filter,
    show,
)
from outbox_relay.cli.output import DONE, FAILED, NOT_FOUND, say

if TYPE_CHECKING:
    from outbox_relay.admin.replays import Preview

MOST_RATE = 1_000_000
MOST_ID = 10**18 - 1
"""Largest number of a replay."""
NAMED_TYPES = 10
"""Number of types that a message names."""


def add(commands: Any) -> None:
    """Add the commands of this module."""
    actions = add_group(commands, "replay", "deliver events of a sink again")
    about = "redeliver events that a sink has already settled; print the replay ID"
    start = add_command(actions, "start", _start, about, "json", "reason", "yes")
    for name, metavar, about in (
        ("--sink", "SINK", "the sink whose events are delivered again"),
        ("--type", "PATTERN", "only this event type; * matches any characters"),
        ("--key", "KEY", "only events with this key"),
        ("--tenant", "TENANT", "only events of this tenant"),
        ("--to", "SINK", "deliver to this sink instead"),
    ):
        start.add_argument(name, type=text, metavar=metavar, help=about, required=name == "--sink")
    add_period(start)
    start.add_argument(
        "--uid", type=uid, action="append", default=[], metavar="UID", dest="uids",
        help="only this event; may be repeated",
    )  # fmt: skip
    about = "maximum number of events per second, on all relays together"
    start.add_argument("--rate", type=integer_between(1, MOST_RATE), metavar="N", help=about)
    start.add_argument("--dry-run", action="store_true", help="only count the events")
    add_command(actions, "list", _list, "list the replays, newest first", "json")
    for name, do, about in (
        ("show", _show, "show a replay: state, counts, and what it waits for"),
        ("pause", _change, "pause a replay on all relays"),
        ("resume", _change, "resume a paused replay"),
        ("cancel", _change, "cancel a replay; delivered events are not undone"),
    ):
        parser = add_command(actions, name, do, about, "json", *(["reason"] if do is _change else []))
        parser.add_argument("id", type=integer_between(1, MOST_ID), metavar="ID", help="its number")


def _start(arguments: argparse.Namespace) -> int:
    """Count the events, ask, start the replay and print its number."""
    from outbox_relay.admin import replays

    wanted, target = read_filter(arguments), arguments.to or arguments.sink
    found = query(arguments, lambda store: replays.preview(store, wanted, arguments.to))
    matched = {"matched": found.matched, "exact": found.exact}
    count = f"{'' if found.exact else 'at least '}{counted(found.matched, 'event')}"
    _say_what_is_missing(found, arguments.sink)
    if arguments.dry_run:
        print_result(arguments, matched, f"{count} match{'es' if found.matched == 1 else ''}")
        return DONE
    if found.unknown and len(found.unknown) == len(wanted["uids"]):
        return NOT_FOUND
    if not found.matched and found.exact:
        if arguments.json:
            print_result(arguments, {"id": None, **matched}, "")
        say("no event that the sink has passed matches: no replay was started")
        return DONE
    question = f"deliver {count} to sink {target}{'' if arguments.to else ' again'}?"
    if not arguments.uids and not confirmed(arguments, question):
        say("no replay was started")
        return FAILED
    number = query(arguments, lambda store: replays.start(store, wanted, arguments.to, arguments.rate, **by(arguments)))
    print_result(arguments, {"id": number, **matched}, str(number))
    if found.paused:
        say(f"sink {target} is paused: the replay waits until it is resumed")
    elif not found.relays:
        say(f"no relay serves sink {target}: the replay waits for one")
    return DONE


def _say_what_is_missing(found: Preview, sink: str) -> None:
    for unknown in found.unknown:
        say(f"there is no event {unknown} in the log")
    if found.oldest is not None:
        say(f"the log begins at {found.oldest.isoformat(timespec='seconds')}: earlier events are not in it")
    if types := found.unrouted:
        more = f" and {len(types) - NAMED_TYPES} more" if len(types) > NAMED_TYPES else ""
        named = ", ".join(types[:NAMED_TYPES]) + more
        say(f"sink {sink} has no route for {named}: a replay delivers only events that the sink's routes match")


def _list(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import replays, replays_text

    show(arguments, replays.replays, replays_text, "replays")
    return DONE


def _show(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import replay_text, replays

    show(arguments, lambda store: replays.replay(store, arguments.id), replay_text)
    return DONE


def _change(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import replays

    number, action = arguments.id, arguments.action
    found = query(arguments, lambda store: replays.change(store, number, action, **by(arguments)))
    if found is None:
        return print_done(arguments, 1, f"replay {number} is {replays.STATE_AFTER[action]}")
    return print_done(arguments, 0, f"replay {number} was {found} already: nothing to do")
