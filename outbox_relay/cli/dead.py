"""Commands on deliveries: dead list, summary, show, retry, discard, export."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.arguments import number_between, text, uid
from outbox_relay.cli.command import (
    Progress,
    add_command,
    add_filter,
    add_group,
    add_limit,
    by,
    confirmed,
    print_done,
    print_result,
    query,
    read_filter,
    show,
)
from outbox_relay.cli.output import DONE, FAILED, NOT_FOUND, say

if TYPE_CHECKING:
    from outbox_relay.admin import Filter, Matched, Report, Result
    from outbox_relay.postgres.store import Store

    Act = Callable[[Store, Filter, Report], Result]

STATES = ("dead", "waiting", "held", "scheduled")


def add(commands: Any) -> None:
    """Add the group ``dead``."""
    group = add_group(commands, "dead", "list, retry and discard dead letters and other deliveries")
    listing = add_command(group, "list", _list, "list dead letters, newest first", "json")
    add_limit(listing, 50, 1000)
    summary = add_command(group, "summary", _summary, "count dead letters by sink, type and kind of error", "json")
    one = add_command(group, "show", _show, "show an event and its deliveries", "json")
    one.add_argument("uid", type=uid, metavar="UID", help="the uid returned by emit")
    one.add_argument("--sink", type=text, metavar="SINK", help="only the delivery to this sink")
    one.add_argument("--payload", action="store_true", help="show payload and headers too")
    about = "retry dead letters now and reset their attempt counts"
    retry = add_command(group, "retry", _retry, about, "json", "reason", "yes")
    retry.add_argument(
        "--rate", type=number_between(0.01, 100_000), metavar="N", help="at most N deliveries per second become due"
    )
    about = "discard dead letters or other deliveries, recorded in the audit"
    discard = add_command(group, "discard", _discard, about, "json", "yes")
    discard.add_argument("--reason", type=text, metavar="TEXT", required=True, help="recorded, and shown by why")
    export = add_command(group, "export", _export, "print dead letters with their payloads, a JSON object per line")
    for parser in (listing, summary):
        add_filter(parser, STATES)
    add_filter(export, STATES[:-1])  # a scheduled event has no delivery yet
    add_filter(retry, STATES[:2])
    add_filter(discard, STATES, "; if named events have no dead letter: scheduled")
    for parser in (retry, discard):
        parser.add_argument("uids", type=uid, nargs="*", metavar="UID", help="only these events")
        parser.add_argument("--dry-run", action="store_true", help="only count")


def _list(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    wanted = read_filter(arguments)

    def ask(store: Store) -> tuple[list[dict[str, Any]], Matched]:
        return admin.list_deliveries(store, wanted, arguments.limit), admin.count_deliveries(store, wanted)

    found, matched = query(arguments, ask, grant="read")
    table = {"deliveries": found, "total": matched.count, "exact": matched.exact}
    print_result(arguments, table, lambda: admin.deliveries_text(found, matched))
    return DONE


def _summary(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(arguments, lambda store: admin.summarize(store, read_filter(arguments)), admin.summary_text)
    return DONE


def _show(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(
        arguments,
        lambda store: admin.show_deliveries(store, arguments.uid, arguments.sink, payload=arguments.payload),
        admin.show_text,
        grant="payloads" if arguments.payload else "read",
    )
    return DONE


def _export(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    def write(store: Store) -> int:
        written = 0
        for found in admin.export(store, read_filter(arguments)):
            sys.stdout.write(json.dumps(found) + "\n")
            written += 1
        return written

    if not query(arguments, write, grant="payloads"):
        say("no delivery matches")
    return DONE


def _retry(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    def act(store: Store, wanted: Filter, report: Report) -> Result:
        return admin.retry_deliveries(store, wanted, report=report, rate=arguments.rate, **by(arguments))

    return _run(arguments, "retry", "retried", act)


def _discard(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    def act(store: Store, wanted: Filter, report: Report) -> Result:
        return admin.discard_deliveries(store, wanted, report=report, **by(arguments))

    return _run(arguments, "discard", "discarded", act)


def _run(arguments: argparse.Namespace, verb: str, done: str, act: Act) -> int:
    """Count what matches, ask, act and report."""
    from outbox_relay import admin

    wanted, matched = _matching(arguments)
    [state] = wanted["states"]
    what = f"{matched} {state} {_deliveries(matched.count)}"
    if arguments.dry_run:
        table = {"matched": matched.count, "exact": matched.exact}
        print_result(arguments, table, f"{what} {'matches' if matched.count == 1 else 'match'}")
        return DONE
    if not matched.count and matched.exact:
        return _none(arguments, wanted, state)
    if not arguments.uids and not confirmed(arguments, f"{verb} {what}?"):
        say("no delivery was changed")
        return FAILED
    wanted["as_of"] = matched.at  # what has come, died or failed since was not counted, and is left
    _, unknown = query(arguments, lambda store: admin.missing(store, wanted, arguments.states))
    line, count = Progress(), 0

    def report(changed: int) -> None:
        nonlocal count
        count = changed
        line.show(f"{done} {changed:,} of {matched}")

    try:
        result = query(arguments, lambda store: act(store, wanted, report))
    except KeyboardInterrupt:
        line.end()
        say(f"interrupted; {done} so far: {count:,}. Run the command again for the others")
        raise
    line.end()
    for each in unknown:
        say(f"no event {each} is known")
    return _report(arguments, wanted, done, result) or (NOT_FOUND if unknown else DONE)


def _matching(arguments: argparse.Namespace) -> tuple[dict[str, Any], Matched]:
    """Return the filter, and what matches it. Named events to discard that have no dead letter may be scheduled."""
    from outbox_relay import admin

    wanted = read_filter(arguments)
    matched = query(arguments, lambda store: admin.count_deliveries(store, wanted))
    if not matched.count and arguments.state is None and arguments.states == STATES and arguments.uids:
        other = {**wanted, "states": ["scheduled"]}
        found = query(arguments, lambda store: admin.count_deliveries(store, other))
        if found.count:
            return other, found
    return wanted, matched


def _none(arguments: argparse.Namespace, wanted: Filter, state: str) -> int:
    """Report that no delivery matches, and where the named events are."""
    from outbox_relay import admin

    lines, unknown = query(arguments, lambda store: admin.missing(store, wanted, arguments.states))
    for line in lines:
        say(line)
    if not unknown or len(unknown) != len(lines):
        print_done(arguments, 0, f"no {state} delivery matches")
    return NOT_FOUND if unknown else DONE


def _report(arguments: argparse.Namespace, wanted: Filter, done: str, result: Result) -> int:
    print_done(arguments, result.done, f"{done} {result.done:,} {_deliveries(result.done)}", result.left)
    if result.under_way:
        say(f"{result.under_way:,} are left because they are being delivered now")
    if result.unsettled:
        from outbox_relay import admin

        sinks = query(arguments, lambda store: admin.positions_behind(store, wanted))
        say(
            f"{result.unsettled:,} not discarded: their shard's position is before them, so a relay would deliver them "
            f"again. Discard them when it has passed them ({sinks})"
        )
    if result.stalled:
        say(
            f"stopped with {result.unvisited:,} left: the sink is not delivering due rows; see outbox-relay status, "
            "and run the command again"
        )
    left = result.unsettled or result.stalled or (arguments.uids and result.under_way)
    return FAILED if left else DONE


def _deliveries(count: int) -> str:
    return "delivery" if count == 1 else "deliveries"
