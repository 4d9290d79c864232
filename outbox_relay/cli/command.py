"""Options and steps that several commands share."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outbox_relay.cli.output import keep_libraries_quiet

if TYPE_CHECKING:
    from outbox_relay.postgres.store import Store
    from outbox_relay.settings import Settings

T = TypeVar("T")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="the configuration, TOML; default: the file named by OUTBOX_RELAY_CONFIG, if any",
    )  # fmt: skip


def add_dsn(parser: argparse.ArgumentParser) -> None:
    """Add ``--dsn``."""
    parser.add_argument(
        "--dsn", metavar="DSN", default=argparse.SUPPRESS,
        help='the database, "postgresql://USER@HOST:PORT/DATABASE"; overrides file and environment',
    )  # fmt: skip


def add_command(
    commands: Any, name: str, do: Callable[[argparse.Namespace], int], text: str, *, dsn: bool = True
) -> argparse.ArgumentParser:
    """Add the command ``name`` with ``--config`` and, unless told otherwise, ``--dsn``; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_config(parser)
    if dsn:
        add_dsn(parser)
    parser.set_defaults(do=do)
    return parser


def load_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings from file, environment and options. Raises ``ConfigurationError``."""
    from outbox_relay import settings

    return settings.load(arguments.config, os.environ, arguments.dsn)


def query(arguments: argparse.Namespace, ask: Callable[[Store], Awaitable[T]], *, check_schema: bool = True) -> T:
    """Return the result of ``ask``, called with a store on a connection of its own."""
    from outbox_relay import admin
    from outbox_relay.postgres import schema_versions

    database = load_settings(arguments).database
    database.require_dsn()
    keep_libraries_quiet()

    async def run() -> T:
        fit = schema_versions.fit if check_schema else None
        async with admin.connect(database.dsn, pooler=database.pooler == "transaction", fit=fit) as store:
            return await ask(store)

    return asyncio.run(run())
