"""A server of NATS with JetStream, on a port and a directory of its own."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

START_SECONDS = 20
PROGRAM = "nats-server"


def require() -> None:
    """Skip the test where there is no server. In CI it fails."""
    if shutil.which(PROGRAM) is None:
        reason = f"needs Debian's package {PROGRAM}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


class NatsServer:
    """A server that can be stopped, killed and started again, with what it has stored."""

    def __init__(self, *options: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="nats-"))
        self._options = options
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the address for clients."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process, for signals."""
        if self._process is None:
            raise RuntimeError("the server does not run")
        return self._process.pid

    def start(self) -> None:
        """Start it, unless it runs, and wait until it answers."""
        if self._process is not None:
            return
        program = shutil.which(PROGRAM) or PROGRAM
        command = [program, "-js", "-a", "127.0.0.1", "-p", str(self.port), "-sd", str(self._directory), *self._options]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603
        until = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{PROGRAM} did not start: {(self._directory / 'log').read_text()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it, so that it writes nothing more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Kill it, and remove what it has stored."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
