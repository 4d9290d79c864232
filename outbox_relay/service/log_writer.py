"""The handler of the log. A thread writes the lines, so that nothing else waits for their reader.

A pipe that is not read is full after 64 KB. The next write would then block the caller, the leases of this relay would
end, and every relay whose output goes to the same collector would stop in the same way.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable

MOST_LINES = 10_000
"""Lines that wait to be written. Lines beyond them are dropped, and counted."""
PIECE_BYTES = select.PIPE_BUF
"""Size of one write. Up to this size, lines of several processes are not mixed in a pipe."""
FLUSH_SECONDS = 1.0
"""Longest wait for the lines that are left when the process ends."""


class LogWriter(logging.Handler):
    """Writes lines to a file descriptor in order.

    ``report_dropped`` logs the number of lines that were dropped; it is called once lines are written again.
    """

    def __init__(self, descriptor: int, report_dropped: Callable[[int], None]) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._report_dropped = report_dropped
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_LINES)
        self._dropped = 0
        threading.Thread(target=self._serve, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leave a line to the thread, or drop it if too many wait. Called with the lock of the handler."""
        try:
            line = (self.format(record) + "\n").encode(errors="backslashreplace")
        except Exception as error:
            line = f"a line of {record.name} cannot be formatted: {type(error).__name__}\n".encode()
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until all lines are written, at most for a second."""
        until = time.monotonic() + FLUSH_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)

    def close(self) -> None:
        """Write the lines that are left, for at most a second, and end the thread."""
        self.flush()
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        finally:
            super().close()

    def _serve(self) -> None:
        while (line := self._lines.get()) is not None:
            left = memoryview(line)
            try:
                while left:
                    left = self._write(left)
            except OSError:  # such as of a disk that is full
                self._dropped += 1
            self._lines.task_done()
            if self._dropped and self._lines.empty():
                dropped, self._dropped = self._dropped, 0
                self._report_dropped(dropped)

    def _write(self, left: memoryview) -> memoryview:
        """Write a piece, and return the rest."""
        try:
            return left[os.write(self._descriptor, left[:PIECE_BYTES]) :]
        except BlockingIOError:  # another process has made the file non-blocking
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            poll.poll()
            return left
