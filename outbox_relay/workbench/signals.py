"""Signal handling that is checked between steps, so that no started process is left behind."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNAL_EXIT_CODE = 128
"""Added to the number of the signal, as shells do."""


class Interrupted(Exception):
    """A signal asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = SIGNAL_EXIT_CODE + number


class Signals:
    """Context manager for the main thread that records the first stop signal.

    The second one has its default effect; the watchers of the processes then clean up.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._record) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def check(self) -> None:
        """Raise :class:`Interrupted` if a signal was received."""
        if self._number is not None:
            raise Interrupted(self._number)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self._number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
