"""Signals while the demo runs: the first is looked at between two steps, so that no process starts unnoticed."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_CODE_OF_SIGNALS = 128
"""Shells add a signal's number to it."""


class Interrupted(Exception):
    """Somebody wants the demo to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = EXIT_CODE_OF_SIGNALS + number


class Signals:
    """Notes the first signal; a second one does what it would do without this.

    What it then leaves behind is ended by the watchers of the processes. As a context manager, in the main thread.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def check(self) -> None:
        """Raises :class:`Interrupted` when there was a signal."""
        if self._number is not None:
            raise Interrupted(self._number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
