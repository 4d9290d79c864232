"""Options and steps that several commands share."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outbox_relay.cli import arguments
from outbox_relay.cli.output import keep_libraries_quiet, say
from outbox_relay.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from outbox_relay.postgres.store import Store
    from outbox_relay.settings import Settings
    from outbox_relay.settings.model import DatabaseSettings

T = TypeVar("T")
POOLER = "OUTBOX_RELAY_DATABASE__POOLER"
"""The variable that says whether a pooler is between a command and the database."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="the configuration, TOML; default: the file named by OUTBOX_RELAY_CONFIG, if any",
    )  # fmt: skip


def add_dsn(parser: argparse.ArgumentParser) -> None:
    """Add ``--dsn``."""
    parser.add_argument(
        "--dsn", metavar="DSN", type=arguments.dsn, default=argparse.SUPPRESS,
        help='the database, "postgresql://USER@HOST:PORT/DATABASE"; overrides file and environment',
    )  # fmt: skip


def add_command(
    commands: Any, name: str, do: Callable[[argparse.Namespace], int], text: str, *, dsn: bool = True
) -> argparse.ArgumentParser:
    """Add the command ``name`` with ``--config``, and with ``--dsn`` if ``dsn`` is True; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_config(parser)
    if dsn:
        add_dsn(parser)
    parser.set_defaults(do=do)
    return parser


def add_group(commands: Any, name: str, text: str) -> Any:
    """Add the group of commands ``name`` with ``--config`` and ``--dsn``; return the action to add its commands to."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    add_config(parser)
    add_dsn(parser)
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True)


def load_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings from file, environment and options. Raises ``ConfigurationError``, also if a file blocks."""
    return read_settings(arguments)


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Do what ``load_settings`` does, in this thread, which may block."""
    from outbox_relay import settings

    return settings.load(arguments.config, os.environ, arguments.dsn)


def load_database(arguments: argparse.Namespace) -> DatabaseSettings:
    """Return where the database is. With ``--dsn`` a faulty configuration is reported and not used.

    Raises ``ConfigurationError`` for a faulty one without ``--dsn``.
    """
    from outbox_relay import settings

    try:
        return load_settings(arguments).database
    except ConfigurationError as error:
        if arguments.dsn is None:
            raise ConfigurationError(f"{error}\nwith --dsn DSN, this command needs no configuration") from None
        environ = {name: os.environ[name] for name in (POOLER,) if name in os.environ}
        database = settings.load(None, environ, arguments.dsn).database
    say("the configuration has faults, which outbox-relay check lists: it is not used, --dsn names the database")
    return database


def query(
    arguments: argparse.Namespace,
    ask: Callable[[Store], T],
    *,
    check_schema: bool = True,
    grant: str = "operate",
) -> T:
    """Return the result of ``ask``, which is called with a store on a new connection.

    ``grant`` is the kind of grant that a role needs for it.
    """
    from outbox_relay import admin

    database = load_database(arguments)
    database.require_dsn()
    keep_libraries_quiet()
    pooler = database.pooler == "transaction"
    with admin.connect(database.dsn, pooler=pooler, check_schema=check_schema, grant=grant) as store:
        return ask(store)


def show(
    arguments: argparse.Namespace,
    ask: Callable[[Store], T],
    render: Callable[[T], str],
    as_json: Callable[[T], object] | None = None,
    *,
    grant: str = "read",
) -> T:
    """Print the result of ``ask``, as JSON with ``--json`` and otherwise as ``render`` returns it; return the result.

    ``as_json`` returns the value to print as JSON, if that is not the result itself.
    """
    found = query(arguments, ask, grant=grant)
    print(json.dumps(as_json(found) if as_json else found) if arguments.json else render(found))
    return found
