"""Checks that the servers and processes of a program are still running, and that no signal asked it to stop."""

from __future__ import annotations

from outbox_relay.workbench.embedded.process import ProcessFailed, WatchedProcess
from outbox_relay.workbench.processes import PythonProcess
from outbox_relay.workbench.signals import Signals


class ProcessWatch:
    """The servers and processes that must not exit by themselves."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._servers: dict[str, WatchedProcess] = {}
        self._processes: list[PythonProcess] = []

    def add_server(self, name: str, server: WatchedProcess) -> None:
        """Watch a server; one of the same name is replaced."""
        self._servers[name] = server

    def remove_server(self, name: str) -> None:
        """Stop watching a server, before it is ended."""
        del self._servers[name]

    def add(self, process: PythonProcess) -> None:
        """Watch a process until it is removed."""
        self._processes.append(process)

    def remove(self, process: PythonProcess) -> None:
        """Stop watching a process, before it is ended."""
        self._processes.remove(process)

    def check_signals(self) -> None:
        """Raise :class:`~outbox_relay.workbench.signals.Interrupted` after a signal."""
        self._signals.check()

    def check(self) -> None:
        """Do the same, and raise :class:`ProcessFailed` if a server or process has exited by itself."""
        self.check_signals()
        for name, server in self._servers.items():
            if not server.alive:
                raise ProcessFailed(f"{name} ended by itself; the end of its log:\n{server.log_tail()}")
        for process in self._processes:
            process.check()

    def log_tails(self) -> str:
        """Return the ends of the logs of all processes, for error messages."""
        return "".join(f"\n{process.name}: {process.log_tail()}" for process in self._processes)
