"""Reading of small files that may not answer: a pipe without a writer, a network file system whose server is gone.

A pipe is given up after a time. What else blocks cannot be interrupted, so it runs in a daemon thread, which keeps no
process from ending. Each sink has a reader of its own: a file that blocks affects only the sink that names it, and at
most one thread per reader is stuck at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import select
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.thread_shortage import is_thread_shortage

T = TypeVar("T")

READ_SECONDS = 10.0
"""Longest wait for the contents of files, in seconds."""
LOOKS = 20
"""Number of times within a wait at which the caller checks if it is over."""
BUSY_SHARE = 0.03
"""Share of the time for which a thread computes, from which on it is not waiting for a file."""
BUSY_TIMES = 12
"""Number of times by which a function that computes may take longer, as one that imports modules on a slow machine."""
MOST_SHARE = 0.25
"""Greatest share of a wait that the time between two of these checks uses up. A process that was frozen took longer."""
PIECE_BYTES = 64 * 1024

_reading = threading.local()
_read: dict[Path, int] = {}
"""The hash of what was last read of each file, under the key of this process."""


def contents_read() -> dict[Path, int]:
    """Return a hash of what was last read of each file, to tell later whether its contents have changed."""
    return dict(_read)


def read_file(path: Path, limit: int) -> bytes:
    """Return the contents of the file at ``path``, up to one byte more than ``limit``. Raises OSError.

    A pipe may be read, such as ``/dev/stdin``. It has ``READ_SECONDS`` to deliver its contents and to end.
    """
    with while_reading(path):
        is_regular = stat.S_ISREG(path.stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_regular else os.O_NONBLOCK))
        try:
            found = _contents(descriptor, limit + 1, None if is_regular else _Patience(READ_SECONDS))
        finally:
            os.close(descriptor)
    _read[path] = hash(found)
    return found


class _Patience:
    """A wait of at most ``seconds``, without most of the time for which this process was frozen.

    Without this, a process that was frozen for longer would give up when it is resumed, though no file was slow. Time
    for which the thread that is waited for computes does not count either, up to ``BUSY_TIMES`` as much. ``worked``
    returns its processor time in seconds.
    """

    def __init__(self, seconds: float, worked: Callable[[], float] = float) -> None:
        self.look_seconds = seconds / LOOKS
        self._most = seconds * MOST_SHARE
        self._left = seconds
        self._left_busy = seconds * BUSY_TIMES
        self._worked = worked
        self._looked, self._work = time.monotonic(), worked()

    def is_over(self) -> bool:
        """Return True if the wait is over. It is to be called every ``look_seconds``."""
        now, work = time.monotonic(), self._worked()
        taken = min(now - self._looked, self._most)
        self._left_busy -= taken
        if abs(work - self._work) < BUSY_SHARE * taken:
            self._left -= taken
        self._looked, self._work = now, work
        return self._left <= 0 or self._left_busy <= 0


def _contents(descriptor: int, most: int, patience: _Patience | None) -> bytes:
    found = bytearray()
    while len(found) < most:
        if patience is not None:
            _wait_for_data(descriptor, patience)
        try:
            piece = os.read(descriptor, min(PIECE_BYTES, most - len(found)))
        except BlockingIOError:
            continue
        if not piece:
            break
        found += piece
    return bytes(found)


def _wait_for_data(descriptor: int, patience: _Patience) -> None:
    arrived = select.poll()
    arrived.register(descriptor, select.POLLIN)
    while not patience.is_over():
        if arrived.poll(patience.look_seconds * 1000):
            return
    raise OSError(0, f"is not a regular file, and its contents did not arrive within {READ_SECONDS:g} s")


@contextlib.contextmanager
def while_reading(path: Path | str | None) -> Generator[None]:
    """Name ``path``, or the setting that names a file, as what this thread reads in the block."""
    names: list[str] | None = getattr(_reading, "names", None)
    if names is None or path is None:
        yield
        return
    names.append(str(path))
    try:
        yield
    finally:
        names.pop()


def is_stream(path: Path) -> bool:
    """Return True if ``path`` is a pipe, a socket or a device, for which a library that opens it may wait."""
    try:
        with while_reading(path):
            mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def probe(path: Path) -> None:
    """Open and close the file or directory at ``path``, which a library is about to open, and ignore errors.

    A file that blocks does so here, under its name.
    """
    with contextlib.suppress(OSError, ValueError), while_reading(path):
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


class FileReader:
    """Runs functions that read files, one after another, each in a daemon thread for at most ``seconds``.

    While one is stuck longer, every call is refused with ``ConfigurationError``, which names its file. So is one for
    which no thread can be started. A call that
    waits for its turn is refused after ``seconds`` too, and a function whose caller has left is not run. A function
    that the reader runs may call it again.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._turn = threading.Lock()
        self._since = float("inf")
        self._names: list[str] = []
        self._clock: int | None = None
        """The clock of the processor time of the thread whose turn it is."""

    def _worked(self) -> float:
        """Return the processor time of the thread whose turn it is, in seconds; 0 if it is not known."""
        clock = self._clock
        try:
            return 0.0 if clock is None else time.clock_gettime(clock)
        except OSError:  # it has ended
            return 0.0

    @property
    def _limit(self) -> float:
        return READ_SECONDS + 1 if self._seconds is None else self._seconds

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``. Raises ``ConfigurationError`` if it takes too long."""
        if getattr(_reading, "reader", None) is self:
            return function()
        running, patience = self._start(function), _Patience(self._limit, self._worked)
        try:
            while not concurrent.futures.wait([running], patience.look_seconds).done:
                if patience.is_over():
                    raise self._stuck()
            return running.result()
        finally:
            running.cancel()

    async def acall(self, function: Callable[[], T]) -> T:
        """Do what ``call`` does, without blocking the event loop."""
        running, patience = self._start(function), _Patience(self._limit, self._worked)
        waiting = asyncio.wrap_future(running)
        try:
            while not (await asyncio.wait([waiting], timeout=patience.look_seconds))[0]:
                if patience.is_over():
                    raise self._stuck()
            return waiting.result()
        finally:
            waiting.cancel()
            running.cancel()

    def _start(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        if self._turn.locked() and time.monotonic() - self._since > self._limit:
            raise self._stuck()
        running = concurrent.futures.Future[T]()
        try:
            threading.Thread(target=self._run, args=(function, running), name="files", daemon=True).start()
        except RuntimeError as error:
            if not is_thread_shortage(error):
                raise
            raise ConfigurationError(f"files of the configuration cannot be read: {error}") from None
        return running

    def _run(self, function: Callable[[], T], running: concurrent.futures.Future[T]) -> None:
        wait_seconds = self._limit
        while not self._turn.acquire(timeout=wait_seconds):
            if running.cancelled():
                return
            wait_seconds = self._limit / LOOKS  # its caller is about to give up, or this process was frozen
        try:
            if not running.set_running_or_notify_cancel():
                return
            self._since, self._names = time.monotonic(), (names := list[str]())
            if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
                self._clock = time.pthread_getcpuclockid(threading.get_ident())
            _reading.reader, _reading.names = self, names
            running.set_result(function())
        except BaseException as error:
            running.set_exception(error)
        finally:
            self._since, self._clock = float("inf"), None
            self._turn.release()

    def _stuck(self) -> ConfigurationError:
        file = ": ".join(self._names) or "a file of the configuration"
        return ConfigurationError(f"{file}: could not be read within {READ_SECONDS:g} s: is its file system available?")


FILES = FileReader()
"""The reader of the configuration, and of all files that it names while no sink runs yet."""
CONNECTION_FILES = FileReader()
"""The reader of ``dsn_file``, at each connection."""
_sink_files = defaultdict[str, FileReader](FileReader)


def sink_files(sink: str) -> FileReader:
    """Return the reader of the files that the settings of ``sink`` name. All clients of the sink share it."""
    return _sink_files[sink]
