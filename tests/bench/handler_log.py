"""A memory-mapped file in which handlers record the calls that ended, and waits, for the benchmarks."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

LOG = "OUTBOX_BENCH_HANDLER_LOG"
"""Name of the environment variable with the path of the log, for the process of the handlers."""
_HEAD = struct.Struct("=dQQ")
_DONE_AT, _WAITS_AT = 8, 16
_COUNT, _SECONDS = struct.Struct("=Q"), struct.Struct("=d")


class HandlerLog:
    """The file at `path`, created for `capacity` waits if needed. One process opens it, and another one records."""

    def __init__(self, path: Path, capacity: int = 0) -> None:
        if not path.exists():
            path.write_bytes(bytes(_HEAD.size + capacity * _SECONDS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._capacity = (len(self._map) - _HEAD.size) // _SECONDS.size
        _, self._done, self._waits = _HEAD.unpack_from(self._map)

    # -- the benchmark ------------------------------------------------------------------------------------------

    def open(self, at: float) -> None:
        """Let handlers begin; `at` is a value of time.monotonic()."""
        _SECONDS.pack_into(self._map, 0, at)

    def done(self) -> int:
        """Return the number of calls that have ended."""
        return _COUNT.unpack_from(self._map, _DONE_AT)[0]

    def waits(self) -> list[float]:
        """Return the recorded waits in seconds."""
        count = _COUNT.unpack_from(self._map, _WAITS_AT)[0]
        return [_SECONDS.unpack_from(self._map, _HEAD.size + place * _SECONDS.size)[0] for place in range(count)]

    # -- handlers -----------------------------------------------------------------------------------------------

    @property
    def opened_at(self) -> float:
        """Return the time at which handlers may begin; 0 before that."""
        return _SECONDS.unpack_from(self._map)[0]

    def add_wait(self, seconds: float) -> None:
        """Record a wait, unless the file is full."""
        if self._waits < self._capacity:
            _SECONDS.pack_into(self._map, _HEAD.size + self._waits * _SECONDS.size, seconds)
            self._waits += 1
            _COUNT.pack_into(self._map, _WAITS_AT, self._waits)

    def add_done(self) -> None:
        """Count a call that has ended."""
        self._done += 1
        _COUNT.pack_into(self._map, _DONE_AT, self._done)
