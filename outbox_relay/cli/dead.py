"""Commands on deliveries: dead list, summary, show, retry, discard, export."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from outbox_relay.cli import dead_actions
from outbox_relay.cli.arguments import integer_between, text, uid
from outbox_relay.cli.command import add_command, add_group, query, show
from outbox_relay.cli.delivery_filter import add_filter, add_state, read_filter
from outbox_relay.cli.output import DONE, say

if TYPE_CHECKING:
    from outbox_relay.admin import Matched
    from outbox_relay.postgres.store import Store

STATES = ("dead", "waiting", "held", "scheduled")


def add(commands: Any) -> None:
    """Add the group ``dead``."""
    group = add_group(commands, "dead", "list, retry and discard dead letters and other deliveries")
    listing = add_command(group, "list", _list, "list dead letters, newest first")
    listing.add_argument(
        "--limit", type=integer_between(1, 1000), metavar="N", default=50, help="maximum number of entries; default: 50"
    )
    summary = add_command(group, "summary", _summary, "count dead letters by sink, type and kind of error")
    for parser in (listing, summary):
        add_filter(parser)
        add_state(parser, STATES)
        parser.add_argument("--json", action="store_true", help="print JSON")
    one = add_command(group, "show", _show, "show an event and its deliveries")
    one.add_argument("uid", type=uid, metavar="UID", help="the uid returned by emit")
    one.add_argument("--sink", type=text, metavar="SINK", help="only the delivery to this sink")
    one.add_argument("--payload", action="store_true", help="show payload and headers too")
    one.add_argument("--json", action="store_true", help="print JSON")
    dead_actions.add(group, STATES)
    export = add_command(group, "export", _export, "print dead letters with their payloads, a JSON object per line")
    add_filter(export)
    add_state(export, STATES[:-1])  # a scheduled event has no delivery yet


def _list(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    wanted = read_filter(arguments)

    def ask(store: Store) -> tuple[list[dict[str, Any]], Matched]:
        found = admin.list_deliveries(store, wanted, arguments.limit)
        return found, admin.count_deliveries(store, wanted)

    show(arguments, ask, lambda found: admin.deliveries_text(*found), lambda found: _as_json(*found))
    return DONE


def _as_json(found: list[dict[str, Any]], matched: Matched) -> dict[str, Any]:
    return {"deliveries": found, "total": matched.count, "exact": matched.exact}


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
