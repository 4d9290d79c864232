"""Counts in a memory-mapped file, incremented by one process and read by another."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

SLOTS = 4
"""Number of counts in a file."""
_COUNT = struct.Struct("=Q")
_BYTES = SLOTS * _COUNT.size


class Counter:
    """The counts in the file at `path`, which is created if needed. Only one process may write."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._counts = [self.read(slot) for slot in range(SLOTS)]

    def add(self, slot: int, amount: int = 1) -> None:
        """Increment a count."""
        self._counts[slot] += amount
        _COUNT.pack_into(self._map, slot * _COUNT.size, self._counts[slot])

    def read(self, slot: int = 0) -> int:
        """Return the current value of a count."""
        return _COUNT.unpack_from(self._map, slot * _COUNT.size)[0]
