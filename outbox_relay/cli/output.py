"""Exit codes and messages. Data goes to stdout, messages go to stderr."""

from __future__ import annotations

import logging
import sys

from outbox_relay.domain.errors import ConfigurationError, DatabaseUnusable, NotFound, RelayError

DONE, FAILED, USAGE, NOT_FOUND = 0, 1, 2, 3
"""Exit codes. A command with nothing to do is done."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""
PIPE_CLOSED = 141
"""Exit code if the reader of stdout has closed it, as in shells."""


def exit_code(error: RelayError) -> int:
    """Return the exit code for ``error``."""
    match error:
        case NotFound():
            return NOT_FOUND
        case ConfigurationError() | DatabaseUnusable():
            return USAGE
        case _:
            return FAILED


def missing_package(error: ImportError, command: str, extra: str) -> str:
    """Return the message for a command that needs the packages of an extra."""
    reason = str(error).partition("\n")[0]
    return f"outbox-relay {command} needs pip install 'outbox-relay[{extra}]' ({reason})"


def say(message: str) -> None:
    """Print a message to stderr."""
    print(message, file=sys.stderr)


def keep_libraries_quiet() -> None:
    """Suppress log records of libraries. The command reports an error once, in its own words."""
    logging.getLogger().addHandler(logging.NullHandler())
