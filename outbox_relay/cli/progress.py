"""The progress of a long action, on stderr."""

from __future__ import annotations

import sys


class ProgressLine:
    """A line on stderr that is overwritten, if stderr is a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._begun = False

    def show(self, text: str) -> None:
        """Write ``text`` over the line."""
        if self._shown:
            self._begun = True
            print(f"\r{text} ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line, if it was begun."""
        if self._begun:
            print(file=sys.stderr)
