"""The services of compose.yaml that run our image, started without an engine on servers of the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import psycopg
from psycopg.conninfo import make_conninfo

from tests.packaging import compose
from tests.packaging.compose import Service
from tests.support.kafka import KafkaBroker
from tests.support.ports import LOOPBACK, free_port
from tests.support.postgres import PostgresServer
from tests.support.wait import until

COMMAND_SECONDS = 60
READY_SECONDS = 60
STOP_SECONDS = 40
DATABASE = "shop"
ROLES = ("shop_owner", "shop_app", "relay", "page")
# What the image says; test_image compares.
ENTRYPOINT = ["outbox-relay"]
COMMAND = ["run"]
CONFIG = "/etc/outbox-relay/relay.toml"
SECRET = f"{compose.SECRETS}/webhook-secrets"


class Runner(Protocol):
    """The way in which a service becomes a process: in the image, or beside it."""

    def command(
        self, service: Service, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str | Path], dict[str, str]]:
        """Return the command and the environment with which ``arguments`` run as the service would."""
        ...

    def process(self, started: int) -> int:
        """Return the process id of the service, or 0 before it runs; ``started`` is that of its parent."""
        ...


class Beside:
    """Services as plain processes of this project's environment, with the files of the tree instead of mounts."""

    def command(
        self, service: Service, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str | Path], dict[str, str]]:
        """Return the same command, with the files where the tree has them."""
        own = {**environment, "PYTHONPATH": str(compose.ROOT), "PYTHONUNBUFFERED": "1"}
        program, *rest = arguments
        if program == "outbox-relay" and service.name == "relay":
            own |= {"OUTBOX_RELAY_CONFIG": CONFIG, "OUTBOX_RELAY_SINKS__CRM__SECRETS": json.dumps([{"file": SECRET}])}
        for mount in service.mounts:
            rest = [argument.replace(mount.target, str(mount.source)) for argument in rest]
            own = {name: value.replace(mount.target, str(mount.source)) for name, value in own.items()}
        run = {"outbox-relay": ["-m", "outbox_relay"], "python3": []}[program]
        return [sys.executable, *run, *rest], {**os.environ, **own}

    def process(self, started: int) -> int:
        """Return the process of the service, which is the one that was started."""
        return started


class Running:
    """A service that runs; its output is in ``log``."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, runner: Runner) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._runner = runner

    def lines(self, beginning: str = "") -> list[str]:
        """Return the lines of its output so far that begin with this text."""
        return [line for line in self.log.read_text().splitlines() if line.startswith(beginning)]

    def pid(self) -> int:
        """Return the process id of the service."""
        return until(
            lambda: self._runner.process(self._process.pid), seconds=READY_SECONDS, what=f"{self.name} is a process"
        )

    def still(self) -> bool:
        """True; raises AssertionError when it has ended."""
        code = self._process.poll()
        assert code is None, f"{self.name} ended with {code}: {self.log.read_text()[-3000:]}"
        return True

    def stop(self) -> int:
        """Send SIGTERM, as an engine does, and return the exit code."""
        os.kill(self.pid(), signal.SIGTERM)
        return self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """Kill the process in any state."""
        if self._process.poll() is None:
            os.kill(self._runner.process(self._process.pid) or self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_SECONDS)


class Stack:
    """A database made as compose.yaml makes it, a broker, and the services that were started on them."""

    def __init__(self, runner: Runner, server: PostgresServer, kafka: KafkaBroker, directory: Path) -> None:
        self._runner = runner
        self._server = server
        self._directory = directory
        self._running: list[Running] = []
        self.kafka = kafka
        self.receiver_port = free_port()
        self.page_port = free_port()
        self._http_port = free_port()
        make_database(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for running in self._running:
            running.kill()

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a service that ends, or ``arguments`` in its place, and wait for the end."""
        service, own, environment = self._fitted(name)
        command, variables = self._runner.command(service, arguments or own, environment)
        return subprocess.run(
            command, capture_output=True, check=False, env=variables, text=True, timeout=COMMAND_SECONDS
        )

    def start(self, name: str) -> Running:
        """Start a service."""
        command, variables = self._runner.command(*self._fitted(name))
        log = self._directory / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        running = Running(name, process, log, self._runner)
        self._running.append(running)
        return running

    def status(self) -> dict[str, Any]:
        """Return the answer of `outbox-relay status`."""
        done = self.run("relay", "outbox-relay", "status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def emitted(self, pattern: str) -> int:
        """Return the number of events in the log whose type is LIKE this."""
        with psycopg.connect(self._server.dsn(DATABASE)) as connection:
            row = connection.execute("select count(*) from outbox.event where type like %s", (pattern,)).fetchone()
        assert row is not None
        return row[0]

    def uids(self, kind: str) -> set[bytes]:
        """Return the uids of the events of this type in the log, as headers of records have them."""
        with psycopg.connect(self._server.dsn(DATABASE)) as connection:
            rows = connection.execute("select uid::text from outbox.event where type = %s", (kind,)).fetchall()
        assert rows
        return {str(uid).encode() for (uid,) in rows}

    def _fitted(self, name: str) -> tuple[Service, list[str], dict[str, str]]:
        """Return a service with its command, if any, and its environment, with the addresses of the test's servers."""
        service = compose.service(name)
        address = f"@{LOOPBACK}:{self._server.port}/"
        environment = {key: value.replace("@db/", address) for key, value in service.environment.items()}
        if name == "relay":
            environment |= self._relay()
        if name == "shop":
            environment["SHOP_ORDERS_PER_SECOND"] = "50"
        if name == "receiver":
            environment["RECEIVER_LISTEN"] = f"{LOOPBACK}:{self.receiver_port}"
        own = service.arguments(ENTRYPOINT, COMMAND)
        page = {"@db/": address, "--listen=0.0.0.0:8090": f"--listen={LOOPBACK}:{self.page_port}"}
        for ours, here in page.items():
            own = [argument.replace(ours, here) for argument in own]
        return service, own, environment

    def _relay(self) -> dict[str, str]:
        return {
            "OUTBOX_RELAY_DATABASE__DSN": f"postgresql://relay@{LOOPBACK}:{self._server.port}/{DATABASE}",
            "OUTBOX_RELAY_HTTP__LISTEN": f"{LOOPBACK}:{self._http_port}",
            "OUTBOX_RELAY_SINKS__EVENTS__PRODUCER__BOOTSTRAP_SERVERS": self.kafka.bootstrap,
            "OUTBOX_RELAY_SINKS__CRM__URL": f"http://{LOOPBACK}:{self.receiver_port}/hooks/shop",
            "OUTBOX_RELAY_SINKS__CRM__ALLOW_NETWORKS": f"{LOOPBACK}/32",
        }


def make_database(server: PostgresServer) -> None:
    """Make the shop's database on an empty server, by compose.yaml's script and passwords for PostgreSQL."""
    db = compose.read()["services"]["db"]
    (script,) = (volume.split(":")[0] for volume in db["volumes"] if volume.endswith(".sql:ro"))
    server.create_database(DATABASE)
    done = subprocess.run(
        [
            server.bin("psql"), "--no-psqlrc", "--quiet", "-v", "ON_ERROR_STOP=1", f"--file={compose.ROOT / script}",
            make_conninfo(server.dsn(DATABASE)),
        ],
        capture_output=True, check=False, env={**os.environ, **db["environment"]}, text=True, timeout=COMMAND_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for role in ROLES:
        server.require_password(role)
