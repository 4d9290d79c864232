"""The command lines of the pages, parsed by the product's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from typing import cast

from outbox_relay.cli import parser as command_line

COMMON = {"-c", "--config", "--dsn", "-h", "--help", "--version"}
"""Options of all commands, and options that come before a command."""
STANDS_FOR = {
    "UID": "01a1fe9a-d7b3-795c-8af1-aa7f5518f66b",
    "SECONDS": "60",
    "TIME": "2h",
    "N": "20",
    "NAME=VALUE": "name=value",
}
"""Placeholders of the pages, and values that the parser accepts in their place."""


@cache
def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return command_line.build()


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command; a command of a group is named by both words."""
    found: dict[str, argparse.ArgumentParser] = {}
    for name, command in _choices(parser(), "command").items():
        inside = _choices(command, "action")
        found |= {f"{name} {action}": parser for action, parser in inside.items()} if inside else {name: command}
    return found


def _choices(of: argparse.ArgumentParser, dest: str) -> dict[str, argparse.ArgumentParser]:
    """Return the commands that the argument `dest` of a parser chooses from."""
    for action in _actions(of):
        choices: object = action.choices
        if action.dest == dest and isinstance(choices, dict):
            return cast("dict[str, argparse.ArgumentParser]", choices)
    return {}


def options(command: str) -> set[str]:
    """Return the options of a command, except those of all commands."""
    return {option for action in _with_nested(parsers()[command]) for option in action.option_strings} - COMMON


def _with_nested(of: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the actions of a parser and of the commands below it."""
    own = list(_actions(of))
    below = [cast("dict[str, argparse.ArgumentParser]", action.choices) for action in own if action.dest == "action"]
    return own + [action for choices in below for each in choices.values() for action in _actions(each)]


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
