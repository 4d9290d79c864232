"""Reading of small files, of which a pipe may not answer."""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path

READ_SECONDS = 10.0
"""Longest wait for the contents of a pipe, in seconds."""
PIECE_BYTES = 64 * 1024


def read_file(path: Path, limit: int) -> bytes:
    """Return the contents of the file at ``path``, up to one byte more than ``limit``. Raises OSError.

    A pipe may be read, such as ``/dev/stdin``. It has ``READ_SECONDS`` to deliver its contents and to end.
    """
    is_regular = stat.S_ISREG(path.stat().st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_regular else os.O_NONBLOCK))
    try:
        return _contents(descriptor, limit + 1, None if is_regular else time.monotonic() + READ_SECONDS)
    finally:
        os.close(descriptor)


def _contents(descriptor: int, most: int, until: float | None) -> bytes:
    found = bytearray()
    arrived = select.poll()
    arrived.register(descriptor, select.POLLIN)
    while len(found) < most:
        if until is not None and not arrived.poll(max(0.0, until - time.monotonic()) * 1000):
            raise OSError(0, f"is not a regular file, and its contents did not arrive within {READ_SECONDS:g} s")
        try:
            piece = os.read(descriptor, min(PIECE_BYTES, most - len(found)))
        except BlockingIOError:
            continue
        if not piece:
            break
        found += piece
    return bytes(found)


def is_stream(path: Path) -> bool:
    """Return True if ``path`` is a pipe, a socket or a device, for which a library that opens it may wait."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
