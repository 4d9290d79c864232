"""A server process in a temporary directory: started, watched, stopped and removed."""

from __future__ import annotations

import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self

from outbox_relay.workbench.embedded.account import CURRENT, Account
from outbox_relay.workbench.embedded.ports import free_port
from outbox_relay.workbench.embedded.process import WatchedProcess


class Server(ABC):
    """A server on a port of the loopback address, with its files in a directory.

    Without `port`, it gets a free one. Without `directory`, a temporary one is created in `parent`, whose name begins
    with `prefix`, and finally removed; one that is given exists and is kept. The output of the server, which runs as
    `account`, goes to the file `log` in it.

    As a context manager it is prepared, started and finally ended. Raise
    :class:`~outbox_relay.workbench.embedded.process.ProcessFailed` if it does not start.
    """

    name: ClassVar[str]
    """Subject of error messages."""
    start_seconds: ClassVar[float] = 60
    stop_seconds: ClassVar[float] = 20
    """Timeout of each signal that ends the server."""
    end_signals: ClassVar[tuple[signal.Signals, ...]] = ()
    """Sent in turn, before SIGKILL, to a server that did not start or is removed."""
    on_orphan: ClassVar[Literal["KILL", "QUIT"]] = "KILL"
    """Signal that ends the server if this Python process dies."""

    def __init__(
        self,
        prefix: str,
        log: str,
        *,
        account: Account = CURRENT,
        parent: Path | None = None,
        directory: Path | None = None,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        self._account = account
        self._process: WatchedProcess | None = None
        self._keep = directory is not None
        self.directory = directory or account.new_directory(prefix, parent)
        self.log = self.directory / log

    def __enter__(self) -> Self:
        try:
            self.prepare()
            self.start_first()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """Return the command line of the server."""

    @abstractmethod
    def answers(self) -> bool:
        """Return True if the server answers requests."""

    @property
    def expectation(self) -> str:
        """Return what a start waits for, as a clause for error messages."""
        return f"{self.name} answers on port {self.port}"

    @property
    def process(self) -> WatchedProcess:
        """Return the server's process. Raise RuntimeError while the server is stopped."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process

    def prepare(self) -> None:  # noqa: B027 - most servers need nothing
        """Write the files that the server needs before its first start."""

    def start_first(self) -> None:
        """Start the server for the first time; a subclass may choose another port."""
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._process = self._run(self.command(), self.log)
        try:
            self._process.wait_until(self.answers, seconds=self.start_seconds, what=self.expectation)
        except BaseException:
            self._end(*self.end_signals)
            raise

    def kill(self) -> None:
        """End the server by SIGKILL if it is running."""
        self._end()

    def close(self) -> None:
        """End the server and remove its directory, unless that is kept."""
        self._end(*self.end_signals)
        if not self._keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def environment(self) -> Mapping[str, str] | None:
        """Return the environment variables of the server; None means those of this process."""
        return None

    def _run(self, command: Sequence[str | Path], log: Path) -> WatchedProcess:
        return WatchedProcess(
            command,
            directory=self.directory,
            log=log,
            account=self._account,
            environment=self.environment(),
            on_orphan=self.on_orphan,
            keep=self._keep,
        )

    def _end(self, *signals: signal.Signals) -> None:
        if self._process is not None:
            self._process.end(*signals, seconds=self.stop_seconds)
            self._process = None
