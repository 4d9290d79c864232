"""A few counts in a file that one process raises and another reads, without a word between them."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

SLOTS = 4
"""How many counts a file has."""
_COUNT = struct.Struct("=Q")
_BYTES = SLOTS * _COUNT.size


class Counter:
    """The counts in the file at `path`, which is made if it is missing; one process may write."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._counts = [self.read(slot) for slot in range(SLOTS)]

    def add(self, slot: int, more: int = 1) -> None:
        """Raise a count."""
        self._counts[slot] += more
        _COUNT.pack_into(self._map, slot * _COUNT.size, self._counts[slot])

    def read(self, slot: int = 0) -> int:
        """A count as it is now."""
        return _COUNT.unpack_from(self._map, slot * _COUNT.size)[0]
