"""The command line."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]

GARBAGE_OBJECTS = 50_000
"""Number of new objects after which the garbage collector of a command's process looks for cycles among them.

With Python's default, 700, collections take a tenth of the start of a command, whose imports leave hardly any cycles,
and in a relay, which has thousands of events in flight, a third of the time that it takes to create their tuples.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names and return its exit code. None means that the process is this command.

    A SIGHUP during the start of a relay stays pending until its handler is installed. Otherwise it would end the
    process.
    """
    given = sys.argv[1:] if argv is None else argv
    if argv is None:
        gc.set_threshold(GARBAGE_OBJECTS)
    is_relay = "run" in given and "retention" not in given
    if is_relay:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from outbox_relay.cli.entry import main as run

    code = run(given)
    if is_relay:
        import logging

        for handler in logging.getLogger().handlers:
            handler.flush()
    if is_relay and argv is None:
        os._exit(code)  # threads that hang, such as those of ``asyncio.to_thread`` in a handler, would keep the process
    return code
