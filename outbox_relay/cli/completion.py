"""The command completion: a script with which a shell completes commands, options and file names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, cast

from outbox_relay.cli.output import DONE

SHELLS: Final = ("bash", "zsh", "fish")
FILES: Final = ("FILE", "FILE|-")
"""Metavariables of arguments that name a file."""
DIRECTORY: Final = "DIR"


def add(commands: Any, root: argparse.ArgumentParser) -> None:
    """Add the command of this module, which completes what ``root`` parses."""
    text = "print the script with which a shell completes commands, options and file names"
    parser: argparse.ArgumentParser = commands.add_parser("completion", help=text, description=text, allow_abbrev=False)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(do=partial(_completion, root))


def _completion(root: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    import shtab

    for action in _actions(root):
        if action.metavar in FILES:
            vars(action)["complete"] = shtab.FILE
        elif action.metavar == DIRECTORY:
            vars(action)["complete"] = shtab.DIRECTORY
    print(shtab.complete(root, arguments.shell))
    return DONE


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of the commands below it."""
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage] - argparse has no other way
        yield action
        choices: object = action.choices
        if isinstance(choices, dict):
            for command in cast("dict[str, argparse.ArgumentParser]", choices).values():
                yield from _actions(command)
