"""One process with its own directory: started, watched, signalled, stopped, and gone when this Python process is."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outbox_relay.workbench.embedded.account import Account

LOG_TAIL_BYTES = 4_000
"""How much of a log's end an error message shows."""
LOOK_SECONDS = 0.02
"""Pause between two looks at something that is waited for."""
DISMISS_SECONDS = 10
"""Longest time that a watcher takes to go when it is told that all is well."""

# Reads from a pipe that this Python process holds open. A line means that all is well; the end of the pipe without one
# means that Python died: then the process $1 is killed (asked to quit first by signal $2) and its directory $3 removed.
_WATCH = """
read -r line && exit 0
kill -CONT "$1" 2>/dev/null
kill -"$2" "$1" 2>/dev/null
tries=0
while kill -0 "$1" 2>/dev/null && [ $tries -lt 50 ]; do sleep 0.1; tries=$((tries + 1)); done
kill -KILL "$1" 2>/dev/null
rm -rf "$3"
"""


class ProcessFailed(RuntimeError):
    """A process could not be started, ended by itself, or did not answer in time; the message has its log's end."""


class WatchedProcess:
    """A running server: its process, and a watcher that ends it should this Python process die.

    `command` runs in `directory` as `account`, in a session of its own, so that Ctrl-C reaches only this process. Its
    output goes to `log`. `on_orphan` is the signal by which the watcher asks an abandoned server to quit; it removes
    `directory` afterwards.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        directory: Path,
        log: Path,
        account: Account,
        environment: Mapping[str, str] | None = None,
        on_orphan: str = "TERM",
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - programs of wheels, and this one's own
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=account.user,
                group=account.group,
                extra_groups=account.extra_groups,
            )
        self._watcher = _watcher(self._process.pid, on_orphan, directory)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Is the process still running (stopped by SIGSTOP counts)?"""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How the process ended, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait_until(self, fact: Callable[[], object], *, seconds: float, what: str) -> None:
        """Wait until `fact` answers something true. An exception of `fact` goes through at once.

        Raises :class:`ProcessFailed`, which names `what` should have become true, when the process ends before or
        `seconds` have passed.
        """
        deadline = time.monotonic() + seconds
        while not fact():
            if not self.alive:
                raise ProcessFailed(f"{what}: the process ended with {self.exit_code}: {self.log_tail()}")
            if time.monotonic() >= deadline:
                raise ProcessFailed(f"{what}: not within {seconds:g} s: {self.log_tail()}")
            time.sleep(LOOK_SECONDS)

    def wait(self, seconds: float) -> int | None:
        """Wait until the process has ended by itself; its exit code, or None when it still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            self._dismiss_watcher()
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self.alive:
            self._process.send_signal(number)

    def end(self, *signals: signal.Signals, seconds: float) -> None:
        """Ask the process to end by each signal in turn, waiting `seconds` after each, and at last by SIGKILL."""
        self.send(signal.SIGCONT)
        for number in (*signals, signal.SIGKILL):
            self.send(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                break
        self._dismiss_watcher()

    def log_tail(self) -> str:
        """The end of the server's log, for error messages."""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _dismiss_watcher(self) -> None:
        if self._watcher.returncode is None:
            self._watcher.communicate(b"done\n", timeout=DISMISS_SECONDS)


def _watcher(pid: int, on_orphan: str, directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - a script of our own
        ["/bin/sh", "-c", _WATCH, "watch", str(pid), on_orphan, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
