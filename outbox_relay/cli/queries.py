"""Commands that ask the database: status, doctor, why, audit."""

from __future__ import annotations

import argparse
from typing import Any

from outbox_relay.cli.arguments import integer_between, moment, seconds, text, uid
from outbox_relay.cli.command import add_command, show
from outbox_relay.cli.output import DONE, FAILED, say


def add(commands: Any) -> None:
    """Add the commands of this module."""
    status = add_command(commands, "status", _status, "show the progress of every sink, and the relays that are alive")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.add_argument(
        "--max-oldest", type=seconds, metavar="SECONDS",
        help="exit with 1 when the oldest event that a sink has not settled is older",
    )  # fmt: skip
    doctor = add_command(commands, "doctor", _doctor, "examine sinks, relays, log and server, and say what to do")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--max-oldest", type=seconds, metavar="SECONDS",
        help="age of the oldest unsettled event from which a sink counts as behind; default: 300",
    )  # fmt: skip
    why = add_command(commands, "why", _why, "show the delivery state of an event, sink by sink")
    which = why.add_mutually_exclusive_group(required=True)
    which.add_argument("uid", type=uid, metavar="UID", nargs="?", help="the uid returned by emit")
    which.add_argument("--key", type=text, metavar="KEY", help="the newest events with this key that are in the log")
    why.add_argument(
        "--limit",
        type=integer_between(1, 1000),
        metavar="N",
        default=10,
        help="maximum number of events with --key; default: 10",
    )
    why.add_argument("--json", action="store_true", help="print JSON")
    audit = add_command(commands, "audit", _audit, "list what people and relays changed, newest first")
    audit.add_argument("--since", type=moment, metavar="TIME", help="only since a time, or an age such as 2h")
    audit.add_argument(
        "--limit",
        type=integer_between(1, 10_000),
        metavar="N",
        default=50,
        help="maximum number of entries; default: 50",
    )
    audit.add_argument("--json", action="store_true", help="print JSON")


def _status(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    found = show(arguments, admin.status, admin.status_text)
    late = admin.too_old(found, arguments.max_oldest) if arguments.max_oldest is not None else []
    problems = [*late, *admin.not_answered_lines(found)]
    for line in problems:
        say(line)
    return FAILED if problems else DONE


def _doctor(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import findings_text
    from outbox_relay.admin.doctor import doctor

    limits = {} if arguments.max_oldest is None else {"oldest_seconds": arguments.max_oldest}
    found = show(
        arguments,
        lambda store: doctor(store, **limits),
        findings_text,
        lambda found: {"findings": [each.as_dict() for each in found]},
    )
    return FAILED if any(each.severity == "critical" for each in found) else DONE


def _why(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    if arguments.key is None:
        show(arguments, lambda store: admin.why(store, arguments.uid), admin.why_text)
    else:
        show(arguments, lambda store: admin.why_key(store, arguments.key, arguments.limit), admin.why_key_text)
    return DONE


def _audit(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(
        arguments,
        lambda store: admin.audit(store, arguments.since, arguments.limit),
        admin.audit_text,
        lambda found: {"audit": found},
    )
    return DONE
