"""Python programs and relays as processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.embedded.account import CURRENT
from outbox_relay.workbench.embedded.process import ProcessFailed, WatchedProcess

STOP_SECONDS = 30
KILL_SECONDS = 5
ASK_SECONDS = 1.0
"""Timeout of one request to a relay."""


class PythonProcess(WatchedProcess):
    """A Python module run in `directory`, with a log file named after the process.

    `command` is the module and its arguments; `environment` holds additional environment variables.
    """

    def __init__(self, name: str, command: list[str], directory: Path, **environment: str) -> None:
        self.name = name
        super().__init__(
            [sys.executable, "-m", *command],
            directory=directory,
            log=directory / f"{name}.log",
            account=CURRENT,
            environment={**_environment(), **environment},
        )

    def stop(self) -> None:
        """Send SIGTERM and wait for exit code 0. Raise :class:`ProcessFailed` otherwise."""
        self.send(signal.SIGTERM)
        code = self.wait(STOP_SECONDS)
        if code != 0:
            how = f"did not stop within {STOP_SECONDS} s" if code is None else f"stopped with {code}"
            raise ProcessFailed(f"{self.name} {how}; the end of its log:\n{self.log_tail()}")

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self.end(seconds=KILL_SECONDS)


class RelayProcess(PythonProcess):
    """One `outbox-relay run` with its own configuration file, answering health requests on `port`."""

    def __init__(self, name: str, config: str, port: int, directory: Path, **environment: str) -> None:
        self._port = port
        file = directory / f"{name}.toml"
        file.write_text(config)
        command = ["outbox_relay", "run", "-c", str(file)]
        super().__init__(name, command, directory, OUTBOX_RELAY_LOG_FORMAT="console", **environment)

    def shards(self) -> Mapping[str, int] | None:
        """Return the number of owned shards by sink; None if the relay is not ready or does not answer."""
        answer = self._get("/readyz")
        if answer is None:
            return None
        try:
            body: dict[str, Any] = json.loads(answer)
        except ValueError:
            return None
        return {name: sink["shards"] for name, sink in body["sinks"].items()}

    def metrics(self) -> str | None:
        """Return the text of its metrics; None if the relay does not answer."""
        answer = self._get("/metrics")
        return None if answer is None else answer.decode()

    def _get(self, path: str) -> bytes | None:
        """Return the body of an answer with status 200; None without one."""
        connection = http.client.HTTPConnection(ports.LOOPBACK, self._port, timeout=ASK_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return body if answer.status == http.client.OK else None


def _environment() -> dict[str, str]:
    """Return this process's environment without variables that libpq or the relay would read."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PG", "OUTBOX_RELAY_"))}
