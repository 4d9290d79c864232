"""The demo's own processes: relays, receiver, consumer and shop, each watched, each with a log of its own."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import sys
from base64 import b64encode
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from outbox_relay.workbench.demo import receiver
from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.embedded.account import CURRENT
from outbox_relay.workbench.embedded.process import PartFailed, ServerProcess

P = TypeVar("P", bound="Part")

START_SECONDS = 30
STOP_SECONDS = 30
KILL_SECONDS = 5
ASK_SECONDS = 1.0
"""Longest time for one question to a relay."""
SECRET_BYTES = 32

KAFKA, WEBHOOK = "events", "crm"
"""The names of the two sinks."""
CONFIG = """
[database]
dsn = "{dsn}"

[relay]
name = "{name}"
lease_seconds = {lease_seconds}

[http]
listen = "127.0.0.1:{port}"

[sinks.events]
type = "kafka"
topic = "{topic}"
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"

[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
timeout_seconds = 2

[routes]
"order.*" = ["events", "crm"]
"""
LEASE_SECONDS = 3
TOPIC = "shop.orders"


class Part:
    """One process: its name, its log, and whether it may have ended."""

    def __init__(self, name: str, command: list[str], directory: Path, **environment: str) -> None:
        self.name = name
        self.process = ServerProcess(
            [sys.executable, "-m", *command],
            directory=directory,
            log=directory / f"{name}.log",
            account=CURRENT,
            environment={**_environment(), **environment},
        )

    def check(self) -> None:
        """Raises :class:`PartFailed` when the process has ended, which it was not asked to."""
        if not self.process.alive:
            raise PartFailed(
                f"{self.name} ended by itself with {self.process.exit_code}; the end of its log:\n"
                f"{self.process.last_words()}"
            )

    def stop(self) -> None:
        """Ask the process to end by SIGTERM; raises :class:`PartFailed` when it does not, or not with exit code 0."""
        self.process.send(signal.SIGTERM)
        code = self.process.wait(STOP_SECONDS)
        if code != 0:
            how = f"did not stop within {STOP_SECONDS} s" if code is None else f"stopped with {code}"
            raise PartFailed(f"{self.name} {how}; the end of its log:\n{self.process.last_words()}")

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self.process.end(seconds=KILL_SECONDS)


class Relay(Part):
    """One `outbox-relay run`."""

    def __init__(self, name: str, config: str, port: int, directory: Path) -> None:
        self._port = port
        file = directory / f"{name}.toml"
        file.write_text(config)
        command = ["outbox_relay", "run", "-c", str(file)]
        super().__init__(name, command, directory, OUTBOX_RELAY_LOG_FORMAT="console")

    def shards(self) -> Mapping[str, int] | None:
        """How many shards it owns, by sink; None while it is not ready or does not answer."""
        connection = http.client.HTTPConnection(ports.LOOPBACK, self._port, timeout=ASK_SECONDS)
        try:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            body: dict[str, Any] = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()
        return (
            {name: sink["shards"] for name, sink in body["sinks"].items()} if answer.status == http.client.OK else None
        )


class Parts:
    """Starts the processes in `directory`; leaving `stack` ends them."""

    def __init__(self, stack: ExitStack, directory: Path, dsn: str, bootstrap: str) -> None:
        self._stack = stack
        self._directory = directory
        self._dsn = dsn
        self._bootstrap = bootstrap
        self._secret = f"whsec_{b64encode(secrets.token_bytes(SECRET_BYTES)).decode()}"
        self._hook_port = ports.free_port()

    def receiver(self, journal: Path) -> Part:
        """The receiver of webhooks, once it listens."""
        command = ["outbox_relay.workbench.demo.receiver", "--port", str(self._hook_port), "--journal", str(journal)]
        part = self._add(Part("receiver", command, self._directory, **{receiver.SECRET: self._secret}))
        part.process.wait_until(
            lambda: ports.answers(self._hook_port), seconds=START_SECONDS, what="the receiver of webhooks listens"
        )
        return part

    def consumer(self, journal: Path) -> Part:
        """The consumer of the topic."""
        where = ["--bootstrap", self._bootstrap, "--topic", TOPIC]
        command = ["outbox_relay.workbench.demo.consumer", *where, "--journal", str(journal)]
        return self._add(Part("consumer", command, self._directory))

    def shop(self, summary: Path) -> Part:
        """The shop; it begins at once."""
        command = ["outbox_relay.workbench.demo.shop", "--dsn", self._dsn, "--summary", str(summary)]
        return self._add(Part("shop", command, self._directory))

    def relay(self, name: str) -> Relay:
        """A relay, which is not ready yet."""
        port = ports.free_port()
        config = CONFIG.format(
            dsn=self._dsn,
            name=name,
            lease_seconds=LEASE_SECONDS,
            port=port,
            topic=TOPIC,
            bootstrap=self._bootstrap,
            url=f"http://{ports.LOOPBACK}:{self._hook_port}{receiver.PATH}",
            secret=self._secret,
        )
        return self._add(Relay(name, config, port, self._directory))

    def _add(self, part: P) -> P:
        self._stack.callback(part.kill)
        return part


def _environment() -> dict[str, str]:
    """This process's environment without what would reach libpq or the relay."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PG", "OUTBOX_RELAY_"))}
