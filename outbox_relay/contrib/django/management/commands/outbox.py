"""Run a command of outbox-relay on a database of ``settings.DATABASES``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, Final, TextIO, cast

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, connections

from outbox_relay.cli.entry import escape_unencodable, main
from outbox_relay.contrib.django.databases import dsn_of, is_pooled
from outbox_relay.postgres.connection import reaches_server

POOLER: Final = "OUTBOX_RELAY_DATABASE__POOLER"
COMMANDS: Final = frozenset((
    "attempts", "audit", "catalogue", "dead", "doctor", "emit", "erase", "migrate", "pause", "rebase", "replay",
    "resume", "retention", "running", "schedules", "sinks", "status", "why",
))  # fmt: skip
"""The commands that need a database and no configuration."""


@contextmanager
def _pooler_named(alias: str) -> Generator[None]:
    """Name the pooler of a database, if there is one, in the environment, as the command reads it."""
    if not is_pooled(alias) or POOLER in os.environ or reaches_server(dsn_of(alias)):
        yield
        return
    os.environ[POOLER] = "transaction"
    try:
        yield
    finally:
        del os.environ[POOLER]


class Command(BaseCommand):
    """The command ``manage.py outbox``. Its arguments are those of ``outbox-relay``, without ``--dsn``."""

    help = "Run a command of outbox-relay on a database of this project, such as `outbox status`."
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the database and the command."""
        parser.add_argument(
            "--database", default=DEFAULT_DB_ALIAS, metavar="ALIAS", help="the database, default: default"
        )
        parser.add_argument(
            "arguments", nargs=argparse.REMAINDER, metavar="COMMAND ...", help=f"one of {', '.join(sorted(COMMANDS))}"
        )

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the command. Raises ``CommandError``, with the exit code of ``outbox-relay``, if it fails."""
        alias, given = options["database"], options["arguments"]
        if alias not in connections:
            raise CommandError(f"--database: DATABASES has no {alias!r}; it has {', '.join(connections)}")
        if not given or given[0] not in COMMANDS:
            raise CommandError(f"name one of the commands {', '.join(sorted(COMMANDS))}, and then its options")
        if any(each.split("=", 1)[0] == "--dsn" for each in given):
            raise CommandError("--dsn comes from settings.DATABASES: name the database with --database ALIAS")
        escape_unencodable()
        # The command writes its own ends of lines, and its messages are not all errors.
        self.stdout.ending = self.stderr.ending = ""
        self.stderr.style_func = None
        out, err = cast("TextIO", self.stdout), cast("TextIO", self.stderr)
        with _pooler_named(alias), redirect_stdout(out), redirect_stderr(err):
            code = main([given[0], "--dsn", dsn_of(alias), *given[1:]])
        if code:
            raise CommandError(f"outbox-relay {given[0]} ended with exit code {code}", returncode=code)
