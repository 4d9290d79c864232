"""Commands that change deliveries: dead retry, dead discard."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.arguments import number_between, text, uid
from outbox_relay.cli.command import add_command, query
from outbox_relay.cli.confirmation import actor, add_reason, add_yes, confirmed
from outbox_relay.cli.delivery_filter import add_filter, add_state, read_filter
from outbox_relay.cli.output import DONE, FAILED, NOT_FOUND, say
from outbox_relay.cli.progress import ProgressLine

if TYPE_CHECKING:
    from outbox_relay.admin import Filter, Matched, Report, Result
    from outbox_relay.postgres.store import Store

    Act = Callable[[Store, Filter, Report], Result]


def add(group: Any, states: Sequence[str]) -> None:
    """Add the commands of this module."""
    retry = add_command(group, "retry", _retry, "retry dead letters now and reset their attempt counts")
    _add_selection(retry, ("dead", "waiting"))
    retry.add_argument(
        "--rate", type=number_between(0.01, 100_000), metavar="N", help="at most N deliveries per second become due"
    )
    add_reason(retry)
    discard = add_command(group, "discard", _discard, "discard dead letters or other deliveries, recorded in the audit")
    _add_selection(discard, states, "; if named events have no dead letter: scheduled")
    discard.set_defaults(otherwise="scheduled")
    discard.add_argument("--reason", type=text, metavar="TEXT", required=True, help="recorded, and shown by why")


def _add_selection(parser: argparse.ArgumentParser, states: Sequence[str], note: str = "") -> None:
    parser.add_argument("uids", type=uid, nargs="*", metavar="UID", help="only these events")
    add_filter(parser)
    add_state(parser, states, note)
    parser.set_defaults(otherwise=None)
    parser.add_argument("--dry-run", action="store_true", help="only count")
    add_yes(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _retry(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    def act(store: Store, wanted: Filter, report: Report) -> Result:
        given: dict[str, Any] = {"actor": actor(), "reason": arguments.reason, "rate": arguments.rate}
        return admin.retry_deliveries(store, wanted, report=report, **given)

    return _run(arguments, "retry", "retried", act)


def _discard(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    def act(store: Store, wanted: Filter, report: Report) -> Result:
        return admin.discard_deliveries(store, wanted, actor=actor(), reason=arguments.reason, report=report)

    return _run(arguments, "discard", "discarded", act)


def _run(arguments: argparse.Namespace, verb: str, done: str, act: Act) -> int:
    """Count what matches, ask, act and report."""
    from outbox_relay import admin

    wanted, matched = _matching(arguments)
    [state] = wanted["states"]
    if arguments.dry_run:
        said = {"matched": matched.count, "exact": matched.exact}
        matches = "matches" if matched.count == 1 else "match"
        print(json.dumps(said) if arguments.json else f"{matched} {state} {_deliveries(matched.count)} {matches}")
        return DONE
    if not matched.count and matched.exact:
        return _none(arguments, wanted, state)
    question = f"{verb} {matched} {state} {_deliveries(matched.count)}?"
    if not arguments.uids and not confirmed(arguments, question):
        say("no delivery was changed")
        return FAILED
    wanted["as_of"] = matched.at  # what has come, died or failed since was not counted, and is left
    _, unknown = query(arguments, lambda store: admin.missing(store, wanted, arguments.states))
    progress = _Actions(matched, done)
    try:
        result = query(arguments, lambda store: act(store, wanted, progress.report))
    except KeyboardInterrupt:
        progress.end()
        say(f"interrupted; {done} so far: {progress.count:,}. Run the command again for the others")
        raise
    progress.end()
    for each in unknown:
        say(f"no event {each} is known")
    return _report(arguments, wanted, done, result) or (NOT_FOUND if unknown else DONE)


def _matching(arguments: argparse.Namespace) -> tuple[dict[str, Any], Matched]:
    """Return the filter, and what matches it. Named events without a delivery in the default state match in another."""
    from outbox_relay import admin

    wanted = read_filter(arguments)
    matched = query(arguments, lambda store: admin.count_deliveries(store, wanted))
    if matched.count or arguments.state is not None or arguments.otherwise is None or not arguments.uids:
        return wanted, matched
    other = {**wanted, "states": [arguments.otherwise]}
    found = query(arguments, lambda store: admin.count_deliveries(store, other))
    return (other, found) if found.count else (wanted, matched)


def _none(arguments: argparse.Namespace, wanted: Filter, state: str) -> int:
    """Report that no delivery matches, and where the named events are."""
    from outbox_relay import admin

    lines, unknown = query(arguments, lambda store: admin.missing(store, wanted, arguments.states))
    for line in lines:
        say(line)
    if unknown and len(unknown) == len(lines):
        return NOT_FOUND
    if arguments.json:
        print(json.dumps({"done": 0, "left": 0}))
    else:
        print(f"no {state} delivery matches")
    return NOT_FOUND if unknown else DONE


def _report(arguments: argparse.Namespace, wanted: Filter, done: str, result: Result) -> int:
    if arguments.json:
        print(json.dumps({"done": result.done, "left": result.left}))
    else:
        print(f"{done} {result.done:,} {_deliveries(result.done)}")
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


class _Actions(ProgressLine):
    """The number of deliveries that were changed so far."""

    def __init__(self, matched: Matched, done: str) -> None:
        super().__init__()
        self.count = 0
        self._matched = matched
        self._done = done

    def report(self, count: int) -> None:
        """Show the number of deliveries that were changed so far."""
        self.count = count
        self.show(f"{self._done} {count:,} of {self._matched}")
