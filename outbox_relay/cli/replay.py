"""Commands on replays: start, list, show, pause, resume, cancel."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.arguments import integer_between, moment, text, uid
from outbox_relay.cli.command import add_command, add_group, query, show
from outbox_relay.cli.confirmation import actor, add_reason, add_yes, confirmed
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
    _add_start(actions)
    listed = add_command(actions, "list", _list, "list the replays, newest first")
    listed.add_argument("--json", action="store_true", help="print JSON")
    one = add_command(actions, "show", _show, "show a replay: state, counts, and what it waits for")
    pause = add_command(actions, "pause", _change, "pause a replay on all relays")
    resume = add_command(actions, "resume", _change, "resume a paused replay")
    cancel = add_command(actions, "cancel", _change, "cancel a replay; delivered events are not undone")
    for parser in (pause, resume, cancel):
        add_reason(parser)
    for parser in (one, pause, resume, cancel):
        parser.add_argument("id", type=integer_between(1, MOST_ID), metavar="ID", help="its number")
        parser.add_argument("--json", action="store_true", help="print JSON")


def _add_start(actions: Any) -> None:
    start = add_command(
        actions, "start", _start, "redeliver events that a sink has already settled; print the replay ID"
    )
    start.add_argument(
        "--sink", type=text, metavar="SINK", required=True, help="the sink whose events are delivered again"
    )
    start.add_argument(
        "--since", type=moment, metavar="TIME", help="only events emitted since a time, or an age such as 2h"
    )
    start.add_argument(
        "--until", type=moment, metavar="TIME", help="only events emitted before a time, or an age such as 2h"
    )
    start.add_argument("--type", type=text, metavar="PATTERN", help="only this event type; * matches any characters")
    start.add_argument("--key", type=text, metavar="KEY", help="only events with this key")
    start.add_argument("--tenant", type=text, metavar="TENANT", help="only events of this tenant")
    start.add_argument(
        "--uid",
        type=uid,
        action="append",
        default=[],
        metavar="UID",
        dest="uids",
        help="only this event; may be repeated",
    )
    start.add_argument("--to", type=text, metavar="SINK", help="deliver to this sink instead")
    start.add_argument(
        "--rate",
        type=integer_between(1, MOST_RATE),
        metavar="N",
        help="maximum number of events per second, on all relays together",
    )
    add_reason(start)
    start.add_argument("--dry-run", action="store_true", help="only count the events")
    add_yes(start)
    start.add_argument("--json", action="store_true", help="print JSON")


def _wanted(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("sink", "type", "key", "tenant", "since", "until")
    wanted: dict[str, Any] = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.uids:
        wanted["uids"] = list(dict.fromkeys(map(str, arguments.uids)))
    return wanted


def _start(arguments: argparse.Namespace) -> int:
    """Count the events, ask, start the replay and print its number."""
    from outbox_relay.admin import replays

    wanted = _wanted(arguments)
    found = query(arguments, lambda store: replays.preview(store, wanted, arguments.to))
    _say_what_is_missing(found, arguments.sink)
    if arguments.dry_run:
        print(_matched_json(found) if arguments.json else f"{_count(found)} match{'es' if found.matched == 1 else ''}")
        return DONE
    if found.unknown and len(found.unknown) == len(wanted["uids"]):
        return NOT_FOUND
    if not found.matched and found.exact:
        return _none(arguments)
    target = arguments.to or arguments.sink
    question = f"deliver {_count(found)} to sink {target}{'' if arguments.to else ' again'}?"
    if not arguments.uids and not confirmed(arguments, question):
        say("no replay was started")
        return FAILED
    given = {"actor": actor(), "reason": arguments.reason}
    number = query(arguments, lambda store: replays.start(store, wanted, arguments.to, arguments.rate, **given))
    print(json.dumps({"id": number, "matched": found.matched, "exact": found.exact}) if arguments.json else number)
    _say_what_it_waits_for(target, found)
    return DONE


def _say_what_is_missing(found: Preview, sink: str) -> None:
    for unknown in found.unknown:
        say(f"there is no event {unknown} in the log")
    if found.oldest is not None:
        say(f"the log begins at {found.oldest.isoformat(timespec='seconds')}: earlier events are not in it")
    if found.unrouted:
        _say_types(found.unrouted, sink)


def _say_types(types: Sequence[str], sink: str) -> None:
    more = f" and {len(types) - NAMED_TYPES} more" if len(types) > NAMED_TYPES else ""
    named = ", ".join(types[:NAMED_TYPES]) + more
    say(f"sink {sink} has no route for {named}: a replay delivers only events that the sink's routes match")


def _none(arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps({"id": None, "matched": 0, "exact": True}))
    say("no event that the sink has passed matches: no replay was started")
    return DONE


def _say_what_it_waits_for(target: str, found: Preview) -> None:
    if found.paused:
        say(f"sink {target} is paused: the replay waits until it is resumed")
    elif not found.relays:
        say(f"no relay serves sink {target}: the replay waits for one")


def _matched_json(found: Preview) -> str:
    return json.dumps({"matched": found.matched, "exact": found.exact})


def _count(found: Preview) -> str:
    return f"{'' if found.exact else 'at least '}{found.matched:,} event{'' if found.matched == 1 else 's'}"


def _list(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import replays, replays_text

    show(arguments, replays.replays, replays_text, lambda found: {"replays": found})
    return DONE


def _show(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import replay_text, replays

    show(arguments, lambda store: replays.replay(store, arguments.id), replay_text)
    return DONE


def _change(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import replays

    number, action = arguments.id, arguments.action
    given = {"actor": actor(), "reason": arguments.reason}
    found = query(arguments, lambda store: replays.change(store, number, action, **given))
    if arguments.json:
        print(json.dumps({"done": int(found is None), "left": 0}))
    elif found is None:
        print(f"replay {number} is {replays.STATE_AFTER[action]}")
    else:
        print(f"replay {number} was {found} already: nothing to do")
    return DONE
