"""Files that do not answer, as those of a file server that is gone."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(path: Path) -> Generator[None]:
    """Keep every open of ``path`` waiting, in any process: a lease blocks it for 45 seconds, or until this ends."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    lease = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(lease)
        signal.signal(signal.SIGIO, before)


def reading_threads() -> int:
    """Return the number of threads that read files."""
    return sum(thread.name == "files" for thread in threading.enumerate())
