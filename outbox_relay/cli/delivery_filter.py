"""The options that select deliveries."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from outbox_relay.cli.arguments import integer_between, moment, text


def add_filter(parser: argparse.ArgumentParser) -> None:
    """Add the options of a filter, all of which must hold."""
    parser.add_argument("--sink", type=text, metavar="SINK", help="only deliveries to this sink")
    parser.add_argument("--type", type=text, metavar="PATTERN", help="only this event type; * matches any characters")
    parser.add_argument("--key", type=text, metavar="KEY", help="only events with this key")
    parser.add_argument(
        "--tenant", type=text, metavar="TENANT", help="only events of this tenant that are still in the log"
    )
    parser.add_argument(
        "--error", type=text, metavar="TEXT", help="only if the last error contains TEXT (case-insensitive)"
    )
    parser.add_argument("--status", type=integer_between(0, 99_999), metavar="N", help="only with this last status")
    parser.add_argument(
        "--since", type=moment, metavar="TIME", help="only events emitted since a time, or an age such as 2h"
    )
    parser.add_argument(
        "--until", type=moment, metavar="TIME", help="only events emitted before a time, or an age such as 2h"
    )


def add_state(parser: argparse.ArgumentParser, states: Sequence[str], note: str = "") -> None:
    """Add ``--state``, whose default is the first of ``states``. ``note`` is added to its help."""
    parser.add_argument("--state", choices=states, help=f"default: {states[0]}{note}")
    parser.set_defaults(states=states)


def read_filter(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the filter that the options describe."""
    names = ("sink", "type", "key", "tenant", "error", "status", "since", "until")
    wanted = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if uids := getattr(arguments, "uids", None):
        wanted["uids"] = list(dict.fromkeys(map(str, uids)))
    if "states" in arguments:
        wanted["states"] = [arguments.state or arguments.states[0]]
    return wanted
