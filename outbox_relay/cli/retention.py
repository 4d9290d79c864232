"""The command retention: the days of the log, and one pass over them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.command import add_command, add_group, load_settings, show
from outbox_relay.cli.confirmation import actor, add_reason
from outbox_relay.cli.output import DONE, FAILED, say

if TYPE_CHECKING:
    from outbox_relay.admin.retention import RetentionRun


def add(commands: Any) -> None:
    """Add the commands of this module."""
    actions = add_group(commands, "retention", "show and empty the days of the log that are past keep_days")
    status = add_command(actions, "status", _status, "show each day: events, bytes, archive, and what keeps it")
    status.add_argument("--json", action="store_true", help="print JSON")
    run = add_command(actions, "run", _run, "empty all days past keep_days that nothing keeps")
    add_reason(run)
    run.add_argument("--dry-run", action="store_true", help="change nothing; show what would be emptied")
    run.add_argument("--json", action="store_true", help="print JSON")


def _status(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(arguments, admin.retention_status, admin.retention_text)
    return DONE


def _run(arguments: argparse.Namespace) -> int:
    return _preview(arguments) if arguments.dry_run else _do(arguments)


def _preview(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin

    show(arguments, admin.preview_retention, admin.preview_text, grant="operate")
    return DONE


def _do(arguments: argparse.Namespace) -> int:
    from outbox_relay import admin
    from outbox_relay.postgres.retention import Person
    from outbox_relay.retention.archiver import archiver_for

    settings = load_settings(arguments)
    database, stated = settings.database, settings.retention
    pooler = database.pooler == "transaction"
    archiver = archiver_for(stated.archive, stated.archive_format, database.dsn, pooler=pooler)
    progress = say if sys.stderr.isatty() else _ignore
    by = Person(actor(), arguments.reason)
    run = show(
        arguments,
        lambda store: admin.run_retention(store, archiver, by, progress),
        admin.outcome_text,
        _as_json,
        grant="operate",
    )
    return FAILED if run.outcome.failed else DONE


def _as_json(run: RetentionRun) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "done": len(outcome.emptied),
        "left": len(outcome.left),
        "emptied": outcome.emptied,
        "kept": outcome.left,
        "keep_days": run.policy.keep_days,
        "keep_days_of": run.keep_days_of,
    }


def _ignore(_: str) -> None:
    """Show no progress without a terminal."""
