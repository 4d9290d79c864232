"""The question before an action that changes much, the name of the person who runs it, and the reason."""

from __future__ import annotations

import argparse
import getpass
import socket
import sys

from outbox_relay.cli.arguments import reason
from outbox_relay.domain.errors import ConfigurationError


def add_reason(parser: argparse.ArgumentParser) -> None:
    """Add ``--reason``."""
    parser.add_argument("--reason", type=reason, metavar="TEXT", help="recorded in the audit")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add ``--yes``."""
    parser.add_argument("--yes", action="store_true", help="do not ask; required without a terminal")


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


def actor() -> str:
    """Return the operating system's user and host, for the audit."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no such user id in a container
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:255]
