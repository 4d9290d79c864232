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

T = TypeVar("T")

READ_SECONDS = 10.0
"""Longest wait for the contents of files, in seconds."""
LOOKS = 20
"""Number of times that a waiting thread looks, within the longest wait, if its function has ended."""
PIECE_BYTES = 64 * 1024

_reading = threading.local()


def read_file(path: Path, limit: int) -> bytes:
    """Return the contents of the file at ``path``, up to one byte more than ``limit``. Raises OSError.

    A pipe may be read, such as ``/dev/stdin``. It has ``READ_SECONDS`` to deliver its contents and to end.
    """
    with while_reading(path):
        is_regular = stat.S_ISREG(path.stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_regular else os.O_NONBLOCK))
        try:
            return _contents(descriptor, limit + 1, None if is_regular else time.monotonic() + READ_SECONDS)
        finally:
            os.close(descriptor)


def _contents(descriptor: int, most: int, until: float | None) -> bytes:
    found = bytearray()
    while len(found) < most:
        if until is not None:
            _wait_for_data(descriptor, until)
        try:
            piece = os.read(descriptor, min(PIECE_BYTES, most - len(found)))
        except BlockingIOError:
            continue
        if not piece:
            break
        found += piece
    return bytes(found)


def _wait_for_data(descriptor: int, until: float) -> None:
    arrived = select.poll()
    arrived.register(descriptor, select.POLLIN)
    if not arrived.poll(max(0, until - time.monotonic()) * 1000):
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


class _Turn:
    """One function that a ``FileReader`` runs, and how long it has run."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._seconds = 0.0

    def is_over(self, limit: float) -> bool:
        """Return True if the function has run for ``limit`` seconds, without those for which this process was frozen.

        Between two looks, which come ``LOOKS`` times within the limit, no more time counts than they should be apart.
        """
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._looked, limit / LOOKS)
            self._looked = now
            return self._seconds >= limit


class FileReader:
    """Runs functions that read files, one after another, each in a daemon thread for at most ``seconds``.

    While one is stuck longer, every call is refused with ``ConfigurationError``, which names its file. A function that
    the reader runs may call it again.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._turn: _Turn | None = None

    @property
    def _limit(self) -> float:
        return READ_SECONDS + 1 if self._seconds is None else self._seconds

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``. Raises ``ConfigurationError`` if it takes too long."""
        if getattr(_reading, "reader", None) is self:
            return function()
        running = self._start(function)
        while not concurrent.futures.wait([running], self._limit / LOOKS).done:
            self._refuse_if_stuck()
        return running.result()

    async def acall(self, function: Callable[[], T]) -> T:
        """Do what ``call`` does, without blocking the event loop."""
        waiting = asyncio.wrap_future(self._start(function))
        try:
            while not (await asyncio.wait([waiting], timeout=self._limit / LOOKS))[0]:
                self._refuse_if_stuck()
            return waiting.result()
        finally:
            waiting.cancel()

    def _start(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        self._refuse_if_stuck()
        running = concurrent.futures.Future[T]()
        running.set_running_or_notify_cancel()
        threading.Thread(target=self._run, args=(function, running), name="files", daemon=True).start()
        return running

    def _run(self, function: Callable[[], T], running: concurrent.futures.Future[T]) -> None:
        try:
            running.set_result(self._in_turn(function))
        except BaseException as error:
            running.set_exception(error)

    def _in_turn(self, function: Callable[[], T]) -> T:
        while not self._lock.acquire(timeout=self._limit / LOOKS):
            self._refuse_if_stuck()
        try:
            self._turn = turn = _Turn()
            _reading.reader, _reading.names = self, turn.names
            return function()
        finally:
            self._turn = None
            self._lock.release()

    def _refuse_if_stuck(self) -> None:
        if (turn := self._turn) and turn.is_over(self._limit):
            file = ": ".join(turn.names) or "a file of the configuration"
            reason = f"could not be read within {READ_SECONDS:g} s: is its file system available?"
            raise ConfigurationError(f"{file}: {reason}")


FILES = FileReader()
"""The reader of the configuration, and of all files that it names while no sink runs yet."""
CONNECTION_FILES = FileReader()
"""The reader of ``dsn_file``, at each connection."""
_sink_files = defaultdict[str, FileReader](FileReader)


def sink_files(sink: str) -> FileReader:
    """Return the reader of the files that the settings of ``sink`` name. All clients of the sink share it."""
    return _sink_files[sink]
