"""Options and steps that several commands share."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outbox_relay.cli.arguments import dsn, integer_between, moment, reason, text
from outbox_relay.cli.output import DONE, keep_libraries_quiet, say
from outbox_relay.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from outbox_relay.postgres.store import Store
    from outbox_relay.settings import Settings
    from outbox_relay.settings.model import DatabaseSettings

T = TypeVar("T")
POOLER = "OUTBOX_RELAY_DATABASE__POOLER"
"""The variable that says whether a pooler is between a command and the database."""
FILTERS = ("sink", "type", "key", "tenant", "error", "status", "since", "until")
"""The options that select deliveries."""


def add_common(parser: argparse.ArgumentParser, *, with_dsn: bool = True) -> None:
    """Add ``--config``, and ``--dsn`` if ``with_dsn`` is True."""
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="the configuration, TOML; default: the file named by OUTBOX_RELAY_CONFIG, if any",
    )  # fmt: skip
    if with_dsn:
        parser.add_argument(
            "--dsn", metavar="DSN", type=dsn, default=argparse.SUPPRESS,
            help='the database, "postgresql://USER@HOST:PORT/DATABASE"; overrides file and environment',
        )  # fmt: skip


def add_command(
    commands: Any,
    name: str,
    do: Callable[[argparse.Namespace], int],
    about: str,
    *options: str,
    with_dsn: bool = True,
) -> argparse.ArgumentParser:
    """Add the command ``name`` and return its parser.

    Of ``options``, "json", "reason" and "yes" add the option of that name, and "uid", "sink" and "name" an argument.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    add_common(parser, with_dsn=with_dsn)
    for option in options:
        match option:
            case "json":
                parser.add_argument("--json", action="store_true", help="print JSON")
            case "reason":
                parser.add_argument("--reason", type=reason, metavar="TEXT", help="recorded in the audit")
            case "yes":
                parser.add_argument("--yes", action="store_true", help="do not ask; required without a terminal")
            case _:
                parser.add_argument(option, type=text, metavar=option.upper(), help=f"the {option}")
    parser.set_defaults(do=do)
    return parser


def add_group(commands: Any, name: str, about: str) -> Any:
    """Add the group of commands ``name`` with ``--config`` and ``--dsn``; return the action to add its commands to."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    add_common(parser)
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True)


def add_limit(parser: argparse.ArgumentParser, default: int, most: int, noun: str = "entries") -> None:
    """Add ``--limit``."""
    about = f"maximum number of {noun}; default: {default}"
    parser.add_argument("--limit", type=integer_between(1, most), metavar="N", default=default, help=about)


def add_period(parser: argparse.ArgumentParser) -> None:
    """Add ``--since`` and ``--until``."""
    for name, word in (("--since", "since"), ("--until", "before")):
        about = f"only events emitted {word} a time, or an age such as 2h"
        parser.add_argument(name, type=moment, metavar="TIME", help=about)


def add_filter(parser: argparse.ArgumentParser, states: Sequence[str], note: str = "") -> None:
    """Add the options that select deliveries, all of which must hold. The default state is the first of ``states``."""
    for name, metavar, about in (
        ("--sink", "SINK", "only deliveries to this sink"),
        ("--type", "PATTERN", "only this event type; * matches any characters"),
        ("--key", "KEY", "only events with this key"),
        ("--tenant", "TENANT", "only events of this tenant that are still in the log"),
        ("--error", "TEXT", "only if the last error contains TEXT (case-insensitive)"),
    ):
        parser.add_argument(name, type=text, metavar=metavar, help=about)
    parser.add_argument("--status", type=integer_between(0, 99_999), metavar="N", help="only with this last status")
    add_period(parser)
    parser.add_argument("--state", choices=states, help=f"default: {states[0]}{note}")
    parser.set_defaults(states=states)


def read_filter(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the filter that the options describe."""
    wanted = {name: found for name in FILTERS if (found := getattr(arguments, name, None)) is not None}
    if uids := getattr(arguments, "uids", None):
        wanted["uids"] = list(dict.fromkeys(map(str, uids)))
    if "states" in arguments:
        wanted["states"] = [arguments.state or arguments.states[0]]
    return wanted


# -- settings and database --------------------------------------------------------------------------------------------


def load_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings from file, environment and options. Blocks. Raises ``ConfigurationError``."""
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
    arguments: argparse.Namespace, ask: Callable[[Store], T], *, check_schema: bool = True, grant: str = "operate"
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


# -- output and consent -----------------------------------------------------------------------------------------------


def show(
    arguments: argparse.Namespace,
    ask: Callable[[Store], T],
    render: Callable[[T], str],
    key: str = "",
    *,
    grant: str = "read",
) -> T:
    """Print the result of ``ask``, as JSON with ``--json`` and otherwise as ``render`` returns it; return the result.

    With ``key`` the JSON is an object with the result under that name.
    """
    found = query(arguments, ask, grant=grant)
    print_result(arguments, {key: found} if key else found, lambda: render(found))
    return found


def print_result(arguments: argparse.Namespace, found: object, render: Callable[[], str] | str) -> None:
    """Print ``found`` with ``--json``, otherwise the text."""
    print(json.dumps(found) if arguments.json else render if isinstance(render, str) else render())


def print_done(arguments: argparse.Namespace, done: int, words: str, left: int = 0) -> int:
    """Print the result of an action, and return the exit code."""
    print_result(arguments, {"done": done, "left": left}, words)
    return DONE


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is followed by an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def confirmed(arguments: argparse.Namespace, question: str) -> bool:
    """Return True with ``--yes``, or if the person at the terminal answers yes.

    Raises ``ConfigurationError`` without a terminal and without ``--yes``.
    """
    if arguments.yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(f"{question} Not a terminal: add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def by(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return who acts, the operating system's user and host, and why, for the audit."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no such user id in a container
        user = "unknown"
    return {"actor": f"{user}@{socket.gethostname()}"[:255], "reason": arguments.reason}


class Progress:
    """A line on stderr that is overwritten, if stderr is a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._begun = False

    def show(self, words: str) -> None:
        """Write ``words`` over the line."""
        if self._shown:
            self._begun = True
            print(f"\r{words} ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line, if it was begun."""
        if self._begun:
            print(file=sys.stderr)
