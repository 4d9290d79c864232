"""The command line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names and return its exit code.

    A SIGHUP during the start of a relay stays pending until its handler is installed. Otherwise it would end the
    process.
    """
    given = sys.argv[1:] if argv is None else argv
    if "run" in given and "retention" not in given:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from outbox_relay.cli.entry import main as run

    return run(given)
