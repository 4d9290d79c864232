"""Commands on single deliveries: attempts, running."""

from __future__ import annotations

import argparse
from typing import Any

from outbox_relay.cli.arguments import seconds, uid
from outbox_relay.cli.command import add_command, show
from outbox_relay.cli.output import DONE


def add(commands: Any) -> None:
    """Add the commands of this module."""
    attempts = add_command(
        commands, "attempts", _attempts, "show every recorded attempt of an event, and what is outstanding"
    )
    attempts.add_argument("uid", type=uid, metavar="UID", help="the uid returned by emit")
    attempts.add_argument("--json", action="store_true", help="print JSON")
    running = add_command(commands, "running", _running, "show the deliveries that are running as rows")
    running.add_argument(
        "--longer-than",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="only deliveries running for at least this long",
    )
    running.add_argument("--json", action="store_true", help="print JSON")


def _attempts(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(arguments, lambda store: admin.attempts(store, arguments.uid), admin.attempts_text)
    return DONE


def _running(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(arguments, lambda store: admin.running(store, arguments.longer_than), admin.running_text)
    return DONE
