"""Command lines of the pages, read by the command line's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import cast

from outbox_relay.cli import parser as command_line

COMMON = {"-c", "--config", "--dsn", "-h", "--help", "--version"}
"""What every command takes, and what stands before commands."""
STANDS_FOR = {
    "UID": "01a1fe9a-d7b3-795c-8af1-aa7f5518f66b",
    "SECONDS": "60",
    "N": "20",
    "NAME=VALUE": "name=value",
}
"""What a page writes where a reader puts something of their own and the parser wants a certain form."""


def parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    return command_line.build()


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Command → its parser."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in _actions(parser()):
        found |= cast("dict[str, argparse.ArgumentParser]", action.choices if action.dest == "command" else {})
    return found


def options(command: str) -> set[str]:
    """The options that a command has beside those of all."""
    return {option for action in _actions(parsers()[command]) for option in action.option_strings} - COMMON


def _actions(of: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    return of._actions  # pyright: ignore[reportPrivateUsage] - argparse has no other way


def parse(words: Sequence[str]) -> None:
    """Read `outbox-relay` and these words as a reader would type them; raises AssertionError when that is refused."""
    code: object = 0
    try:
        parser().parse_args([STANDS_FOR.get(word, word) for word in words])
    except SystemExit as end:
        code = end.code
    assert code == 0, f"outbox-relay {' '.join(words)}: refused"
