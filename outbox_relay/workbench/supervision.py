"""Signals and processes of a program that starts other processes, so that none is left however it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from subprocess import SubprocessError
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from outbox_relay.domain.errors import RelayError
from outbox_relay.workbench.embedded.process import WatchedProcess

T = TypeVar("T")

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


class ProcessWatch:
    """The processes that must not exit by themselves."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._processes: dict[str, WatchedProcess] = {}

    def add(self, name: str, process: WatchedProcess) -> None:
        """Watch a process until it is removed."""
        self._processes[name] = process

    def remove(self, name: str) -> None:
        """Stop watching a process, before it is ended."""
        del self._processes[name]

    def check(self) -> None:
        """Raise :class:`Interrupted` after a signal, and ``ProcessFailed`` if a process has exited by itself."""
        self._signals.check()
        for name, process in self._processes.items():
            process.check(name)

    def log_tails(self) -> str:
        """Return the ends of the logs of all processes, for error messages."""
        return "".join(f"\n{name}: {process.log_tail()}" for name, process in self._processes.items())


def require_modules(names: Iterable[str]) -> None:
    """Raise ImportError if a module is missing, before another process needs it."""
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_guarded(
    run: Callable[[ExitStack, Signals], T], say: Callable[[str], None], failed: Callable[[str], RelayError]
) -> T:
    """Return the result of `run`. Everything that it put on the stack is ended before this returns.

    Raise `failed` with the message of an error, or SystemExit with 128 plus its number after a signal.
    """
    try:
        with Signals() as signals, ExitStack() as stack:
            return run(stack, signals)
    except Interrupted as interrupted:
        say(f"stopped by {interrupted}; nothing is left running")
        raise SystemExit(interrupted.exit_code) from None
    except (RuntimeError, OSError, SubprocessError) as failure:
        raise failed(str(failure)) from failure
