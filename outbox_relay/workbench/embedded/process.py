"""A child process that is stopped, and its directory removed, if this Python process dies."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outbox_relay.workbench.embedded.account import Account

LOG_TAIL_BYTES = 4_000
"""Number of bytes of the end of a log in an error message."""
POLL_SECONDS = 0.02
"""Pause between two evaluations of a condition."""
DISMISS_SECONDS = 10
"""Timeout for the exit of a dismissed watcher."""

# Reads from a pipe that this Python process holds open. A line dismisses the watcher. If the pipe ends without a line,
# Python has died: send signal $2 to process $1, kill it if it does not exit, and remove its directory $3, if named.
_WATCH = """
read -r line && exit 0
kill -CONT "$1" 2>/dev/null
kill -"$2" "$1" 2>/dev/null
tries=0
while kill -0 "$1" 2>/dev/null && [ $tries -lt 50 ]; do sleep 0.1; tries=$((tries + 1)); done
kill -KILL "$1" 2>/dev/null
[ -z "$3" ] || rm -rf "$3"
"""


class ProcessFailed(RuntimeError):
    """A process could not be started, exited by itself or did not answer in time."""


class WatchedProcess:
    """A running process, and a watcher that ends it if this Python process dies.

    `command` runs in `directory` as `account`, in a new session, so that Ctrl-C reaches only the Python process. Its
    output goes to `log`; None means stderr. If Python dies, the watcher sends the signal `on_orphan`, and then removes
    `directory` unless `keep` is true.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        directory: Path,
        log: Path | None,
        account: Account,
        environment: Mapping[str, str] | None = None,
        on_orphan: str = "TERM",
        keep: bool = False,
    ) -> None:
        self.log = log
        with contextlib.nullcontext(sys.stderr) if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - programs of wheels and of this package
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
        self._watcher = _watcher(self._process.pid, on_orphan, None if keep else directory)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return True while the process is running, even if it is stopped by SIGSTOP."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process is running."""
        return self._process.poll()

    def wait_until(self, fact: Callable[[], object], *, seconds: float, what: str) -> None:
        """Wait until `fact` returns a true value; exceptions of `fact` are propagated.

        Raise :class:`ProcessFailed` with the description `what` if the process exits first or `seconds` have passed.
        """
        deadline = time.monotonic() + seconds
        while not fact():
            if not self.alive:
                raise ProcessFailed(f"{what}: the process ended with {self.exit_code}: {self.log_tail()}")
            if time.monotonic() >= deadline:
                raise ProcessFailed(f"{what}: not within {seconds:g} s: {self.log_tail()}")
            time.sleep(POLL_SECONDS)

    def check(self, name: str) -> None:
        """Raise :class:`ProcessFailed` if the process, called `name` in the message, has exited by itself."""
        if not self.alive:
            raise ProcessFailed(f"{name} ended by itself with {self.exit_code}; the end of its log:\n{self.log_tail()}")

    def wait(self, seconds: float) -> int | None:
        """Wait at most `seconds` for the process to exit. Return its exit code, or None if it is still running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            self._dismiss_watcher()
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process is running."""
        if self.alive:
            self._process.send_signal(number)

    def end(self, *signals: signal.Signals, seconds: float) -> None:
        """Send each signal in turn and finally SIGKILL, waiting up to `seconds` after each."""
        self.send(signal.SIGCONT)
        for number in (*signals, signal.SIGKILL):
            self.send(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                break
        self._dismiss_watcher()

    def log_tail(self) -> str:
        """Return the end of the log, for error messages; an empty one if it went to stderr."""
        return "" if self.log is None else self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _dismiss_watcher(self) -> None:
        if self._watcher.returncode is None:
            self._watcher.communicate(b"done\n", timeout=DISMISS_SECONDS)


def _watcher(pid: int, on_orphan: str, directory: Path | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - a script of our own
        ["/bin/sh", "-c", _WATCH, "watch", str(pid), on_orphan, str(directory or "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
