"""Entry point: parse the command line, run the command, return the exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

from outbox_relay.cli.output import DONE, FAILED, INTERRUPTED, PIPE_CLOSED, USAGE, exit_code, missing_package, say
from outbox_relay.cli.parser import build
from outbox_relay.domain.errors import RelayError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names and return its exit code."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:  # None if the process began without it
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, which would fail again.
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # As above: what is left in the buffer cannot be written.
        _discard_output()
        say(f"the output could not be written: {error.strerror}")
        return FAILED
    return code


def _discard_output() -> None:
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def escape_unencodable() -> None:
    """Let stdout and stderr escape the characters that their encodings do not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(argv: Sequence[str]) -> int:
    escape_unencodable()
    try:
        arguments = build().parse_args(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE
    try:
        return arguments.do(arguments)
    except RelayError as error:
        say(str(error))
        return exit_code(error)
    except ImportError as error:
        if (error.name or "").startswith("outbox_relay"):
            raise
        say(missing_package(error, arguments.command, arguments.extra))
        return USAGE
