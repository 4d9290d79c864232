"""The handler of the log, which writes lines in a thread: a reader of stderr that stops reading stops nothing else.

A pipe that is not read is full after 64 KB. The next write would then block the event loop, the leases of this relay
would end, and every relay whose output goes to the same collector would stop in the same way.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

MOST_BYTES = 1 << 20
"""Bytes of lines that wait to be written. Lines beyond them are dropped, and counted."""
FLUSH_SECONDS = 1.0
"""Longest wait for the lines that are left when the process ends."""


class LogWriter(logging.Handler):
    """Writes lines to a file descriptor, in order, in a thread.

    ``report_dropped`` is called in this thread with the number of dropped lines, once lines are written again.
    """

    def __init__(self, descriptor: int, report_dropped: Callable[[int], None]) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._report_dropped = report_dropped
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._closed = False
        # Reentrant, as the lock of a handler: a signal may be logged while a line is put in.
        self._changed = threading.Condition(threading.RLock())
        threading.Thread(target=self._serve, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Put a line in, or drop it if too many bytes are waiting."""
        try:
            line = (self.format(record) + "\n").encode(errors="backslashreplace")
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + len(line) > MOST_BYTES:
                self._dropped += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, at most for a second."""
        until = time.monotonic() + FLUSH_SECONDS
        with self._changed:
            while self._waiting_bytes and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def close(self) -> None:
        """Write what is left, for at most a second, and end the thread."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _serve(self) -> None:
        while lines := self._next_lines():
            with suppress(OSError):  # the reader has gone
                self._write(lines)
            with self._changed:
                self._waiting_bytes -= len(lines)
                dropped, self._dropped = self._dropped, 0
                self._changed.notify_all()
            if dropped:
                self._report_dropped(dropped)

    def _next_lines(self) -> bytes:
        """Wait for lines, and return all that are there; none if the handler is closed."""
        with self._changed:
            while not self._lines and not self._closed:
                self._changed.wait()
            lines = b"".join(self._lines)
            self._lines.clear()
            return lines

    def _write(self, lines: bytes) -> None:
        left = memoryview(lines)
        while left:
            left = left[os.write(self._descriptor, left) :]
