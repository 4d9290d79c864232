"""Threads that call plain handlers. They are daemons: no handler can delay the end of its process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from queue import SimpleQueue


class Threads:
    """At most ``most`` threads, started as they are needed. The relay has no more calls under way than that."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = 0
        self._idle = 0
        self._lock = threading.Lock()

    def run(self, job: Callable[[], None]) -> None:
        """Have a thread call ``job``, which raises nothing. Raises ``RuntimeError`` if there can be no thread."""
        with self._lock:
            starts = self._idle == 0 and self._started < self._most
            if not starts:
                self._idle -= 1
            else:
                self._started += 1
        if starts:
            self._start()
        self._jobs.put(job)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="handler", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._started -= 1
                if not self._started:
                    raise
                self._idle -= 1

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with suppress(BaseException):  # an exception that was set from outside ends no thread
                Context().run(job)  # values of context variables do not pass from one event to the next
            with self._lock:
                self._idle += 1
