"""The command retention: the days of the log, and one pass over them."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from outbox_relay.cli.command import add_command, load_settings, query
from outbox_relay.cli.confirmation import actor
from outbox_relay.cli.output import DONE, FAILED, say


def add(commands: Any) -> None:
    """Add the commands of this module."""
    text = "show and empty the days of the log that are past keep_days"
    group = commands.add_parser("retention", help=text, description=text, allow_abbrev=False)
    actions = group.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = add_command(actions, "status", _status, "show each day: events, bytes, archive, and what keeps it")
    status.add_argument("--json", action="store_true", help="print JSON")
    run = add_command(actions, "run", _run, "empty the days that are past keep_days and that nothing keeps, now")
    run.add_argument("--dry-run", action="store_true", help="change nothing; show what would be emptied")
    run.add_argument("--json", action="store_true", help="print JSON")


def _status(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    found = query(arguments, admin.retention_status)
    print(json.dumps(found) if arguments.json else admin.retention_text(found))
    return DONE


def _run(arguments: argparse.Namespace) -> int:
    return _preview(arguments) if arguments.dry_run else _do(arguments)


def _preview(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    found = query(arguments, admin.preview_retention)
    print(json.dumps(found) if arguments.json else admin.preview_text(found))
    return DONE


def _do(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin
    from outbox_relay.retention.archiver import archiver_for

    settings = load_settings(arguments)
    database, stated = settings.database, settings.retention
    pooler = database.pooler == "transaction"
    archiver = archiver_for(stated.archive, stated.archive_format, database.dsn, pooler=pooler)
    progress = say if sys.stderr.isatty() else _ignore
    policy, outcome = query(arguments, lambda store: admin.run_retention(store, archiver, actor(), progress))
    result = {"done": len(outcome.emptied), "left": len(outcome.left), "emptied": outcome.emptied, "kept": outcome.left}
    print(json.dumps(result) if arguments.json else admin.outcome_text(policy, outcome))
    return FAILED if outcome.failed else DONE


def _ignore(_: str) -> None:
    """Show no progress without a terminal."""
