"""One server process with its own directory: started, signalled, stopped, and gone when the test run is gone."""

import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.account import Account

LOG_TAIL_BYTES = 4_000

# Reads from a pipe that the test run holds open. A line means that all is well; the end of the pipe without one means
# that the run died: then the server $1 is killed (asked to quit first by signal $2) and its directory $3 removed.
_WATCH = """
read -r line && exit 0
kill -CONT "$1" 2>/dev/null
kill -"$2" "$1" 2>/dev/null
tries=0
while kill -0 "$1" 2>/dev/null && [ $tries -lt 50 ]; do sleep 0.1; tries=$((tries + 1)); done
kill -KILL "$1" 2>/dev/null
rm -rf "$3"
"""


class ServerProcess:
    """A running server: its process, and a watcher that ends it should this Python process die.

    `command` runs in `directory` as `account`, in a session of its own, so that Ctrl-C reaches only the test run. Its
    output goes to `log`. `on_orphan` is the signal by which the watcher asks an abandoned server to quit.
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
            self._process = subprocess.Popen(
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

    def last_words(self) -> str:
        """The end of the server's log, for error messages."""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _dismiss_watcher(self) -> None:
        self._watcher.communicate(b"done\n", timeout=10)


def _watcher(pid: int, on_orphan: str, directory: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "watch", str(pid), on_orphan, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
