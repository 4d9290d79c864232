"""Starts relays, receiver, consumer and shop."""

from __future__ import annotations

import secrets
from base64 import b64encode
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.processes import PythonProcess, RelayProcess
from outbox_relay.workbench.shop import receiver

P = TypeVar("P", bound=PythonProcess)

START_SECONDS = 30
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
timeout_seconds = {timeout_seconds}
permanent_statuses = [400]

[routes]
"order.*" = ["events", "crm"]
"""
TROUBLE = """
[sinks.invoices]
type = "webhook"
url = "http://127.0.0.1:{hook_port}/invoices"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
permanent_statuses = [404]

[routes]
"order.*" = ["events", "crm"]
"invoice.*" = ["invoices"]
"""
"""A sink whose destination answers 404, and the routes with it."""
LEASE_SECONDS = 3
TIMEOUT_SECONDS = 2
TOPIC = "shop.orders"


class ShopProcesses:
    """Starts processes in `directory`; they end when `stack` is closed."""

    def __init__(
        self, stack: ExitStack, directory: Path, dsn: str, bootstrap: str, *, with_trouble: bool = False
    ) -> None:
        self._stack = stack
        self._with_trouble = with_trouble
        self._directory = directory
        self._dsn = dsn
        self._bootstrap = bootstrap
        self._secret = f"whsec_{b64encode(secrets.token_bytes(SECRET_BYTES)).decode()}"
        self._hook_port = ports.free_port()

    def receiver(self, journal: Path, broken: Path) -> PythonProcess:
        """Start the webhook receiver and wait until it listens. It refuses damaged orders while `broken` exists."""
        command = ["outbox_relay.workbench.shop.receiver", "--port", str(self._hook_port)]
        command += ["--journal", str(journal), "--broken", str(broken)]
        process = self._add(PythonProcess("receiver", command, self._directory, **{receiver.SECRET: self._secret}))
        process.wait_until(
            lambda: ports.is_listening(self._hook_port), seconds=START_SECONDS, what="the webhook receiver listens"
        )
        return process

    def consumer(self, journal: Path) -> PythonProcess:
        """Start the consumer of the topic."""
        where = ["--bootstrap", self._bootstrap, "--topic", TOPIC]
        command = ["outbox_relay.workbench.shop.consumer", *where, "--journal", str(journal)]
        return self._add(PythonProcess("consumer", command, self._directory))

    def shop(self, summary: Path) -> PythonProcess:
        """Start the shop, which emits immediately."""
        command = ["outbox_relay.workbench.shop.orders", "--dsn", self._dsn, "--summary", str(summary)]
        return self._add(PythonProcess("shop", command, self._directory))

    def relay(self, name: str) -> RelayProcess:
        """Start a relay without waiting until it is ready."""
        port = ports.free_port()
        config = CONFIG.format(
            dsn=self._dsn,
            name=name,
            lease_seconds=LEASE_SECONDS,
            timeout_seconds=TIMEOUT_SECONDS,
            port=port,
            topic=TOPIC,
            bootstrap=self._bootstrap,
            url=f"http://{ports.LOOPBACK}:{self._hook_port}{receiver.PATH}",
            secret=self._secret,
        )
        if self._with_trouble:
            config = config.partition("\n[routes]")[0] + TROUBLE.format(hook_port=self._hook_port, secret=self._secret)
        return self._add(RelayProcess(name, config, port, self._directory))

    def page(self) -> tuple[PythonProcess, str]:
        """Start the page, and return it with its address once it answers."""
        port = ports.free_port()
        where = f"{ports.LOOPBACK}:{port}"
        process = self._add(
            PythonProcess("page", ["outbox_relay", "ui", "--dsn", self._dsn, "--listen", where], self._directory)
        )
        process.wait_until(lambda: ports.is_listening(port), seconds=START_SECONDS, what="the page listens")
        return process, f"http://{where}/"

    def _add(self, process: P) -> P:
        self._stack.callback(process.kill)
        return process
