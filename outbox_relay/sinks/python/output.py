"""The output of handlers, as lines for the log, at a limited rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

MOST_CHARS, MOST_LINES = 500, 20
"""Maximum length of a line, and maximum number of lines in a second. Further ones are dropped and counted."""
Report = Callable[[str, int], None]
"""Receives a line, and the number of those that were dropped before it."""


class OutputReader(asyncio.Protocol):
    """Reads the stdout and stderr of a worker, which never waits for the log."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._partial = b""
        self._second = 0.0
        self._lines = self._dropped = 0

    def data_received(self, data: bytes) -> None:
        """Report complete lines."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[: 4 * MOST_CHARS]
        for line in lines:
            self._add(line)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        """Report the rest."""
        if self._partial:
            self._add(self._partial)

    def _add(self, line: bytes) -> None:
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._second, self._lines = now, 0
        if not line.strip():
            return
        if self._lines >= MOST_LINES:
            self._dropped += 1
            return
        self._lines += 1
        text = "".join(c if c.isprintable() else " " for c in line.decode(errors="replace")[:MOST_CHARS])
        dropped, self._dropped = self._dropped, 0
        self._report(text.strip(), dropped)
