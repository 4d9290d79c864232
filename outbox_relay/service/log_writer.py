"""The handler of the log. A thread writes the lines that stderr does not take at once, so that nothing else waits.

A pipe that is not read is full after 64 KB. The next write would then block the event loop, the leases of this relay
would end, and every relay whose output goes to the same collector would stop in the same way.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

PIECE_BYTES = select.PIPE_BUF
"""Size of one write. Up to this size, lines of several processes are not mixed in a pipe."""
MOST_BYTES = 1 << 20
"""Bytes of lines that wait to be written. Lines beyond them are dropped, and counted."""
RESERVED_BYTES = 64 << 10
"""Bytes more for errors, which are probably the last lines of this process."""
FLUSH_SECONDS = 1.0
"""Longest wait for the lines that are left when the process ends."""


class LogWriter(logging.Handler):
    """Writes lines to a file descriptor in order: at once if it has room for them, and otherwise in a thread.

    So the last line before a crash is not lost. ``report_dropped`` logs the number of lines that were dropped; it is
    called once lines are written again.
    """

    def __init__(self, descriptor: int, report_dropped: Callable[[int], None]) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._report_dropped = report_dropped
        self._pipe_bytes = _size_of_pipe(descriptor)
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._reporting = self._is_cut = self._closed = False
        # The lock of the handler itself. With a second one, a finalizer that logs in the thread could wait for the
        # caller of ``emit``, and this one for the thread.
        assert self.lock is not None  # noqa: S101 - made by the base class
        self._changed = threading.Condition(self.lock)
        threading.Thread(target=self._serve, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or let it wait, or drop it if too many bytes are waiting. Called with the lock."""
        try:
            line = (self.format(record) + "\n").encode(errors="backslashreplace")
        except Exception as error:
            line = f"a line of {record.name} cannot be formatted: {type(error).__name__}\n".encode()
        if not self._waiting_bytes and self._has_room(len(line)):
            self._write_at_once(line)
            return
        most = MOST_BYTES + (RESERVED_BYTES if record.levelno >= logging.ERROR else 0)
        if self._waiting_bytes and self._waiting_bytes + len(line) > most and not self._reporting:
            self._dropped += 1
            return
        self._leave_to_thread(line)

    def flush(self) -> None:
        """Wait until all lines are written, at most for a second."""
        until = time.monotonic() + FLUSH_SECONDS
        with self._changed:
            while self._waiting_bytes and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def close(self) -> None:
        """Write the lines that are left, for at most a second, and end the thread."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _leave_to_thread(self, line: bytes) -> None:
        self._lines.append(line)
        self._waiting_bytes += len(line)
        self._changed.notify_all()

    def _write_at_once(self, line: bytes) -> None:
        """Write a line, of which the rest waits if less was taken."""
        whole = b"\n" + line if self._is_cut else line
        try:
            written = os.write(self._descriptor, whole)
        except BlockingIOError:
            written = 0
        except OSError:
            self._dropped += 1
            return
        self._is_cut = False
        if written < len(whole):
            self._leave_to_thread(whole[written:])
        else:
            self._report()

    def _has_room(self, size: int) -> bool:
        """Return True if a write of ``size`` bytes does not block.

        Other processes may write to the same pipe at any moment, so half of it must be empty.
        """
        if size > PIECE_BYTES:
            return False
        try:
            if self._pipe_bytes:
                return _unread_bytes(self._descriptor) <= self._pipe_bytes // 2
            return _is_writable(self._descriptor, 0)
        except OSError:
            return False

    def _serve(self) -> None:
        while lines := self._next_lines():
            dropped = self._write(lines)
            with self._changed:
                self._waiting_bytes -= sum(map(len, lines))
                self._dropped += dropped
                if not dropped:
                    self._report()
                self._changed.notify_all()

    def _next_lines(self) -> deque[bytes]:
        """Wait for lines, and return all of them; none if the handler is closed."""
        with self._changed:
            while not self._lines and not self._closed:
                self._changed.wait()
            lines, self._lines = self._lines, deque()
            return lines

    def _report(self) -> None:
        """Log how many lines were dropped. There is always room for this line."""
        if not self._dropped or self._reporting:
            return
        dropped, self._reporting = self._dropped, True
        try:
            self._report_dropped(dropped)
        finally:
            self._reporting = False
            self._dropped -= dropped

    def _write(self, lines: deque[bytes]) -> int:
        """Write lines, and return the number of those that cannot be written, as to a disk that is full."""
        done = 0
        for piece, ends in _pieces(lines):
            whole = b"\n" + piece if self._is_cut else piece
            left = memoryview(whole)
            try:
                while left:
                    try:
                        left = left[os.write(self._descriptor, left) :]
                    except BlockingIOError:
                        _is_writable(self._descriptor, None)
            except OSError:
                self._is_cut = self._is_cut or len(left) < len(whole)
                return len(lines) - done
            self._is_cut = False
            done += ends
        return 0


def _pieces(lines: deque[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield lines joined to pieces of at most ``PIECE_BYTES``, or a longer line alone, with the number of lines."""
    joined: list[bytes] = []
    size = 0
    for line in lines:
        if joined and size + len(line) > PIECE_BYTES:
            yield b"".join(joined), len(joined)
            joined, size = [], 0
        joined.append(line)
        size += len(line)
    if joined:
        yield b"".join(joined), len(joined)


def _size_of_pipe(descriptor: int) -> int:
    """Return the bytes that a pipe holds; 0 for any other file."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    except (AttributeError, OSError):  # not on every system
        return 0


def _unread_bytes(descriptor: int) -> int:
    [unread] = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return unread


def _is_writable(descriptor: int, milliseconds: int | None) -> bool:
    """Wait until the descriptor takes bytes; None waits without limit."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(milliseconds))
