"""Relay processes that start quickly: forked from a process that has already imported all modules.

A new Python process spends a second on imports. The fork runs `outbox-relay` as its command line does.

The server process reads a line of JSON for each relay to start, and writes a line when it has started and when it ends.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from outbox_relay import cli

START_SECONDS = 30
LOOK_SECONDS = 0.01
MODULES = ("outbox_relay.service.process",)


class Child:
    """A relay process, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    @property
    def code(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process is running."""
        return self.returncode

    def ended(self, code: int) -> None:
        """Record the exit code."""
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        """Return the exit code; None while the process is running."""
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal if the process is running."""
        if self.returncode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait_for(self, seconds: float) -> int | None:
        """Wait at most `seconds` for the process to exit. Return its exit code, or None if it is still running."""
        self._ended.wait(seconds)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raise `subprocess.TimeoutExpired` if the process is running after `timeout` seconds."""
        code = self.wait_for(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code


class ForkServer:
    """Starts relays, and ends all of them when its context is left. `module` runs :func:`serve`."""

    def __init__(self, module: str = "tests.support.fork_server") -> None:
        self._module = module

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._lock = threading.Lock()
        self._children: dict[int, Child] = {}
        self._started: list[Child] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def start(
        self, arguments: Sequence[str | Path], log: Path, environment: Mapping[str, str], armed: str | None = None
    ) -> Child:
        """Start `outbox-relay` with these arguments, and with these variables alone. `armed` is of the module."""
        order = {
            "arguments": [str(argument) for argument in arguments],
            "log": str(log),
            "environment": dict(environment),
            "armed": armed,
        }
        with self._lock, self._arrived:
            _pipe(self._process.stdin).write(json.dumps(order).encode() + b"\n")
            _pipe(self._process.stdin).flush()
            if not self._arrived.wait_for(lambda: self._started, START_SECONDS):
                raise AssertionError(f"no relay was started within {START_SECONDS} s")
            return self._started.pop()

    def _read(self) -> None:
        for line in _pipe(self._process.stdout):
            said = json.loads(line)
            with self._arrived:
                if "code" in said:
                    self._children.pop(said["pid"]).ended(said["code"])
                else:
                    child = self._children[said["pid"]] = Child(said["pid"])
                    self._started.append(child)
                    self._arrived.notify_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait(10)
        self._reader.join(10)
        _pipe(self._process.stdout).close()


@cache
def of_this_process() -> ForkServer:
    """Return the server that this process started first, which runs until the process ends."""
    server = ForkServer().__enter__()
    atexit.register(server.__exit__, None, None, None)
    return server


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


# -- the process ------------------------------------------------------------------------------------------------------


def serve(
    modules: Sequence[str] = MODULES,
    prepare: Callable[[str | None], None] | None = None,
    blocked: Collection[signal.Signals] = (),
) -> None:
    """Start the requested relays until stdin ends, then kill those that are running.

    `prepare` is called in each before it begins, while the signals `blocked` are blocked.
    """
    _import_everything(modules)
    running: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            if selector.select(LOOK_SECONDS if running else None):
                line = sys.stdin.readline()
                if not line:
                    break
                pid = _fork(json.loads(line), prepare, blocked)
                running.add(pid)
                _say(pid=pid)
            running -= _reap(running)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _import_everything(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    faulthandler.enable()
    gc.collect()
    gc.freeze()


def _fork(
    order: Mapping[str, Any], prepare: Callable[[str | None], None] | None, blocked: Collection[signal.Signals]
) -> int:
    # A signal that arms a relay right after the fork must not end it: it is blocked until the relay handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    pid = os.fork()
    if not pid:
        sys.exit(_relay(order, prepare))  # as a process of its own ends, with its threads and exit handlers
    return pid


def _relay(order: Mapping[str, Any], prepare: Callable[[str | None], None] | None) -> int:
    os.setsid()
    output = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(order["environment"])
    if prepare is not None:
        prepare(order["armed"])
    return cli.main(order["arguments"])


def _reap(running: set[int]) -> set[int]:
    ended: set[int] = set()
    for pid in running:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.add(pid)
            _say(pid=pid, code=os.waitstatus_to_exitcode(status))
    return ended


def _say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
