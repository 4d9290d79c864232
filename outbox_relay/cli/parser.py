"""The parser of all commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from itertools import chain
from typing import Any, NoReturn

from outbox_relay import __version__
from outbox_relay.cli import (
    catalogue,
    completion,
    dead,
    emit,
    erase,
    queries,
    replay,
    retention,
    schedules,
    schema,
    service,
    sinks,
    ui,
    workbench,
)
from outbox_relay.cli.command import add_common
from outbox_relay.cli.output import USAGE

GROUPS = {
    "Run": ("run", "check", "migrate", "rebase", "emit"),
    "Look": (),
    "Act": ("pause", "resume", "dead", "replay", "sinks", "schedules", "retention", "erase"),
    "Development": ("dev", "demo", "catalogue", "completion"),
}
"""The commands in the order of the help; "Look" has all others."""

_SECRETS = re.compile(r"(?<=://)\S*@|password\s*=\s*('[^']*'?|\S+)", re.IGNORECASE)
_INVALID_CHOICE = re.compile(r"invalid choice: '([\w-]+)' \(choose from (.+)\)$")
_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: (?:.* )?(--[\w-]+)")


class _Parser(argparse.ArgumentParser):
    """A parser whose messages suggest the nearest name and do not repeat a password given as an argument."""

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """Refuse unknown arguments here, where the options of the command are known."""
        found, unknown = super().parse_known_args(*args, **options)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        near = self._nearest(message)
        said = _SECRETS.sub("…", message) + (f"; did you mean {near[0]}?" if near else "")
        if _is_of_value(sys.exception()):  # the usage would not help
            self.exit(USAGE, f"{self.prog}: error: {said}\n")
        super().error(said)

    def _nearest(self, message: str) -> list[str]:
        """Return the nearest command to a misspelt one, or the nearest option, if there is one."""
        if found := _INVALID_CHOICE.search(message):
            return get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), 1)
        if found := _UNKNOWN_OPTION.search(message):
            return get_close_matches(found[1], re.findall(r"--[\w-]+", self.format_usage()), 1)
        return []


class _Overview(argparse.RawDescriptionHelpFormatter):
    """Leaves the list of commands to the epilog, which has them in groups."""

    def _format_action(self, action: argparse.Action) -> str:
        return "" if action.dest == "command" else super()._format_action(action)


def _is_of_value(error: BaseException | None) -> bool:
    """Return True if the error is about the value of an argument, which its type has refused."""
    return isinstance(error, argparse.ArgumentError) and isinstance(error.__context__, argparse.ArgumentTypeError)


@cache
def build() -> argparse.ArgumentParser:
    """Return the parser, made once. Its result has ``do``, the function that runs the command."""
    parser = _Parser(
        prog="outbox-relay",
        description="Relay the events of a PostgreSQL transactional outbox to Kafka and webhooks.",
        formatter_class=_Overview,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"outbox-relay {__version__}")
    add_common(parser)
    parser.set_defaults(config=None, dsn=None, extra="relay")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (
        *(schema, queries, service, emit, ui, dead, sinks, replay, schedules, retention, erase, catalogue, workbench),
    ):
        module.add(commands)
    completion.add(commands, parser)
    parser.epilog = _overview(commands.choices)
    return parser


def _overview(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the commands in their groups, and the exit codes."""
    lines: list[str] = []
    others = [name for name in commands if name not in chain(*GROUPS.values())]
    for group, names in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<12} {commands[name].description}" for name in names or others), ""]
    codes = "0 done, or nothing to do; 1 failed; 2 wrong usage, configuration, password, rights or schema; 3 not found"
    return "\n".join([*lines, f"Exit codes: {codes}."])
