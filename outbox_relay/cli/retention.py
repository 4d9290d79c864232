"""The command retention: the days of the log, and one pass over them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from outbox_relay.cli.command import add_command, add_group, by, load_settings, print_result, query, show
from outbox_relay.cli.output import DONE, FAILED, say


def add(commands: Any) -> None:
    """Add the commands of this module."""
    actions = add_group(commands, "retention", "show and empty the days of the log that are past keep_days")
    add_command(actions, "status", _status, "show each day: events, bytes, archive, and what keeps it", "json")
    run = add_command(actions, "run", _run, "empty all days past keep_days that nothing keeps", "json", "reason")
    run.add_argument("--dry-run", action="store_true", help="change nothing; show what would be emptied")


def _status(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(arguments, admin.retention_status, admin.retention_text)
    return DONE


def _run(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin
    from outbox_relay.postgres.retention import Person
    from outbox_relay.retention.archiver import archiver_for

    if arguments.dry_run:
        show(arguments, admin.preview_retention, admin.preview_text, grant="operate")
        return DONE
    settings = load_settings(arguments)
    database, stated = settings.database, settings.retention
    pooler = database.pooler == "transaction"
    archiver = archiver_for(stated.archive, stated.archive_format, database.dsn, pooler=pooler)
    progress = say if sys.stderr.isatty() else _ignore
    run = query(arguments, lambda store: admin.run_retention(store, archiver, Person(**by(arguments)), progress))
    outcome = run.outcome
    table = {
        "done": len(outcome.emptied),
        "left": len(outcome.left),
        "emptied": outcome.emptied,
        "kept": outcome.left,
        "keep_days": run.policy.keep_days,
        "keep_days_of": run.keep_days_of,
    }
    print_result(arguments, table, lambda: admin.outcome_text(run))
    return FAILED if outcome.failed else DONE


def _ignore(_: str) -> None:
    """Show no progress without a terminal."""
