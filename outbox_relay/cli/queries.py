"""Commands that ask the database: status, doctor, why, attempts, running, audit."""

from __future__ import annotations

import argparse
from typing import Any

from outbox_relay.cli.arguments import moment, seconds, text, uid
from outbox_relay.cli.command import add_command, add_limit, print_result, query, show
from outbox_relay.cli.output import DONE, FAILED, say


def add(commands: Any) -> None:
    """Add the commands of this module."""
    about = "show the progress of every sink, and the relays that are alive"
    status = add_command(commands, "status", _status, about, "json")
    doctor = add_command(
        commands, "doctor", _doctor, "examine sinks, relays, log and server, and say what to do", "json"
    )
    for parser, help_text in (
        (status, "exit with 1 when the oldest event that a sink has not settled is older"),
        (doctor, "age of the oldest unsettled event from which a sink counts as behind; default: 300"),
    ):
        parser.add_argument("--max-oldest", type=seconds, metavar="SECONDS", help=help_text)
    why = add_command(commands, "why", _why, "show the delivery state of an event, sink by sink", "json")
    which = why.add_mutually_exclusive_group(required=True)
    which.add_argument("uid", type=uid, metavar="UID", nargs="?", help="the uid returned by emit")
    which.add_argument("--key", type=text, metavar="KEY", help="the newest events with this key that are in the log")
    add_limit(why, 10, 1000, "events with --key")
    attempts = add_command(commands, "attempts", _attempts, "show every recorded attempt of an event", "json")
    attempts.add_argument("uid", type=uid, metavar="UID", help="the uid returned by emit")
    running = add_command(commands, "running", _running, "show the deliveries that are running as rows", "json")
    about = "only deliveries running for at least this long"
    running.add_argument("--longer-than", type=seconds, default=0.0, metavar="SECONDS", help=about)
    audit = add_command(commands, "audit", _audit, "list what people and relays changed, newest first", "json")
    audit.add_argument("--since", type=moment, metavar="TIME", help="only since a time, or an age such as 2h")
    add_limit(audit, 50, 10_000)


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
    found = query(arguments, lambda store: doctor(store, **limits), grant="read")
    print_result(arguments, {"findings": [each.as_dict() for each in found]}, lambda: findings_text(found))
    return FAILED if any(each.severity == "critical" for each in found) else DONE


def _why(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    if arguments.key is None:
        show(arguments, lambda store: admin.why(store, arguments.uid), admin.why_text)
    else:
        show(arguments, lambda store: admin.why_key(store, arguments.key, arguments.limit), admin.why_key_text)
    return DONE


def _attempts(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(arguments, lambda store: admin.attempts(store, arguments.uid), admin.attempts_text)
    return DONE


def _running(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(arguments, lambda store: admin.running(store, arguments.longer_than), admin.running_text)
    return DONE


def _audit(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(arguments, lambda store: admin.audit(store, arguments.since, arguments.limit), admin.audit_text, "audit")
    return DONE
