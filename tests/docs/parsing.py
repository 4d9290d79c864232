"""The command lines of the pages, parsed by the product's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import cast

from outbox_relay.cli import parser as command_line

COMMON = {"-c", "--config", "--dsn", "-h", "--help", "--version"}
"""Options of all commands, and options that come before a command."""
STANDS_FOR = {
    "UID": "01a1fe9a-d7b3-795c-8af1-aa7f5518f66b",
    "SECONDS": "60",
    "N": "20",
    "NAME=VALUE": "name=value",
}
"""Placeholders of the pages, and values that the parser accepts in their place."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return command_line.build()


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in _actions(parser()):
        found |= cast("dict[str, argparse.ArgumentParser]", action.choices if action.dest == "command" else {})
    return found


def options(command: str) -> set[str]:
    """Return the options of a command, except those of all commands."""
    return {option for action in _actions(parsers()[command]) for option in action.option_strings} - COMMON


def _actions(of: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    return of._actions  # pyright: ignore[reportPrivateUsage] - argparse has no other way


def parse(words: Sequence[str]) -> None:
    """Parse the arguments of `outbox-relay`. Raises AssertionError if the parser refuses them."""
    code: object = 0
    try:
        parser().parse_args([STANDS_FOR.get(word, word) for word in words])
    except SystemExit as end:
        code = end.code
    assert code == 0, f"outbox-relay {' '.join(words)}: refused"
