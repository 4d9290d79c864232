"""The output of handlers, as lines for the log, at a limited rate."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

MOST_CHARS, MOST_LINES = 500, 20
"""Maximum length of a line, and maximum number of lines in a second. Further ones are dropped and counted."""
READ_BYTES, MOST_BYTES, PAUSE_SECONDS = 1 << 16, 1 << 20, 0.1
"""Bytes of one read, and how many are read before a pause. A handler that prints more waits, and not the relay."""
Report = Callable[[str, int], None]
"""Receives a line, and the number of those that were dropped before it."""


class OutputReader:
    """Reads the stdout and stderr of a worker from the descriptor ``pipe``, which it owns."""

    def __init__(self, pipe: int, report: Report) -> None:
        self._pipe: int | None = pipe
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._partial = b""
        self._second = 0.0
        self._lines = self._dropped = 0
        self._pause: asyncio.TimerHandle | None = None
        self._bytes = 0
        os.set_blocking(pipe, False)
        self._resume()

    def close(self) -> None:
        """Report what is left, and close the pipe, which a process outside the worker's group may hold open."""
        if self._pipe is None:
            return
        self._bytes = 0
        while self._bytes < MOST_BYTES and self._read_once():
            pass
        self._end()

    def _resume(self) -> None:
        self._pause, self._bytes = None, 0
        if self._pipe is not None:
            self._loop.add_reader(self._pipe, self._read)

    def _read(self) -> None:
        if self._read_once() and self._bytes >= MOST_BYTES and self._pipe is not None:
            self._loop.remove_reader(self._pipe)
            self._pause = self._loop.call_later(PAUSE_SECONDS, self._resume)

    def _read_once(self) -> bool:
        """Read and report once. Return False if there is no more now, or at all."""
        if self._pipe is None:
            return False
        try:
            data = os.read(self._pipe, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._end()
            return False
        self._bytes += len(data)
        self._take(data)
        return True

    def _end(self) -> None:
        if self._pipe is None:
            return
        pipe, self._pipe = self._pipe, None
        self._loop.remove_reader(pipe)
        if self._pause is not None:
            self._pause.cancel()
        os.close(pipe)
        if self._partial:
            self._take(b"\n")

    def _take(self, data: bytes) -> None:
        """Report complete lines. Those beyond the rate are counted without being looked at one by one."""
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._second, self._lines = now, 0
        *lines, rest = (self._partial + data).split(b"\n", MOST_LINES - self._lines)
        for line in lines:
            self._add(line)
        dropped, last = rest.count(b"\n"), rest.rfind(b"\n")
        self._dropped += dropped
        self._partial = rest[last + 1 :][: 4 * MOST_CHARS]

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        self._lines += 1
        text = "".join(c if c.isprintable() else " " for c in line.decode(errors="replace")[:MOST_CHARS])
        dropped, self._dropped = self._dropped, 0
        self._report(text.strip(), dropped)
