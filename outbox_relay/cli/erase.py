"""The command erase: events of a key, or one event, without payload, headers and key."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.arguments import text, uid
from outbox_relay.cli.command import (
    Progress,
    add_command,
    by,
    confirmed,
    counted,
    load_settings,
    print_result,
    query,
)
from outbox_relay.cli.output import DONE, FAILED, say
from outbox_relay.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from outbox_relay.admin import Erased

MANIFEST_SECONDS = 60.0
"""Time after which no more manifests of archives are read."""
NAMED_ARCHIVES = 50
"""Number of archives that a message names. JSON names all."""


def add(commands: Any) -> None:
    """Add the commands of this module."""
    about = "remove payload, headers and key of events that were delivered"
    parser = add_command(commands, "erase", _erase, about, "json", "yes")
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--key", type=text, metavar="K", help="all events with this key")
    subject.add_argument("--uid", type=uid, metavar="U", help="this event")
    parser.add_argument("--reason", type=text, metavar="TEXT", required=True, help="recorded in the audit")
    parser.add_argument("--dry-run", action="store_true", help="only count, and find out whether all are delivered")


def _erase(arguments: argparse.Namespace) -> int:
    if arguments.dry_run or not arguments.yes:
        found = _run(arguments, dry_run=True)
        events = counted(found.matched, "event")
        if found.undelivered:
            return _refused(arguments, found)
        if arguments.dry_run:
            print_result(arguments, {"matched": found.matched, "exact": True}, f"{events} can be erased")
            return DONE
        question = f"Erase payload, headers and key of {events}? They cannot be restored."
        if found.matched and not confirmed(arguments, question):
            say("nothing was erased")
            return FAILED
    result = _run(arguments, dry_run=False)
    return _refused(arguments, result) if result.undelivered else _done(arguments, result)


def _run(arguments: argparse.Namespace, *, dry_run: bool) -> Erased:
    from outbox_relay import admin

    subject = {"uid": str(arguments.uid)} if arguments.key is None else {"key": arguments.key}
    line = Progress()

    def report(phase: str, place: int, upto: int) -> None:
        if phase in {"looking", "erasing"}:
            line.show(f"{phase}: {place:,} of {upto:,} ids")

    try:
        return query(
            arguments, lambda store: admin.erase(store, subject, dry_run=dry_run, report=report, **by(arguments))
        )
    except KeyboardInterrupt:
        say("interrupted; run the command again: it begins with the events that are not erased yet")
        raise
    finally:
        line.end()


def _refused(arguments: argparse.Namespace, result: Erased) -> int:
    """Report which events are undelivered."""
    undelivered = [dict(each) for each in result.undelivered]
    archives = _archives(arguments, result) if result.done else []
    if arguments.json:
        left = {"left": len(undelivered), "undelivered": undelivered, "archives": archives}
        print_result(arguments, {"done": result.done, **left}, "")
    if result.done:
        _say_what_is_left(archives, result)
    for each in undelivered:
        place = f" in replay {each['sink'][1:]}" if each["sink"].startswith("~") else f" in sink {each['sink']}"
        say(f"event {each['uid']} is {each['state']}{place if each['sink'] else ''}")
    erased = f"{counted(result.done, 'event')} erased, then stopped" if result.done else "nothing was erased"
    say(
        f"{erased}: only events that every sink has settled are erased. Wait until they are delivered, or discard them "
        "(outbox-relay dead discard), and run the command again"
    )
    return FAILED


def _done(arguments: argparse.Namespace, result: Erased) -> int:
    archives = _archives(arguments, result)
    table = {"done": result.done, "left": result.left, "archives": archives}
    print_result(arguments, table, f"{counted(result.done, 'event')} erased")
    if result.left:
        say(f"{counted(result.left, 'event')} committed meanwhile: run the command again when they have been delivered")
    _say_what_is_left(archives, result)
    return DONE


def _say_what_is_left(archives: Sequence[Mapping[str, Any]], result: Erased) -> None:
    """Name what the database does not reach, as far as it is known."""
    for holds, words in ((True, "hold"), (None, "may hold")):
        named = [each["address"] for each in archives if each["holds"] is holds]
        if named:
            more = f" and {len(named) - NAMED_ARCHIVES} more" if len(named) > NAMED_ARCHIVES else ""
            say(f"archives that {words} these events: {', '.join(named[:NAMED_ARCHIVES])}{more}")
    if result.statistics:
        say(f"planner statistics on {', '.join(result.statistics)} still contain values: see docs/operations.md")


def _archives(arguments: argparse.Namespace, result: Erased) -> list[dict[str, Any]]:
    """Return the archives that hold the events, or may, as their manifests say. None is asked after a time."""
    from outbox_relay.retention.files import holds_key

    try:
        configured = load_settings(arguments).retention.archive
    except ConfigurationError:  # the command was given --dsn
        configured = ""
    until, found = time.monotonic() + MANIFEST_SECONDS, list[dict[str, Any]]()
    for address in result.archives:
        key_hash = result.key_hash if time.monotonic() <= until else None
        holds = None if key_hash is None else holds_key(address, key_hash, configured)
        if holds is not False:
            found.append({"address": address, "holds": holds})
    return found
