"""One Kafka Connect worker (ConnectStandalone) in a temporary directory, with the jars of Debezium's connector."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.embedded.server import Server
from tests.support.kafka.jars import jars
from tests.support.wait import until

POM = Path(__file__).with_name("pom.xml")
START_SECONDS = 90
REST_SECONDS = 30
JAVA = (
    "java", "-XX:-UsePerfData", "-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)  # fmt: skip


class ConnectWorker(Server):
    """A worker whose own converters are Connect's defaults. Connectors are added while it runs.

    Raise :class:`tests.support.kafka.jars.NoKafka` where Java or Maven is missing.
    """

    name = "Kafka Connect"
    start_seconds = START_SECONDS

    def __init__(self, bootstrap: str, java: Sequence[str] = JAVA) -> None:
        self._java = java
        self._libraries = jars(POM)
        self._bootstrap = bootstrap
        super().__init__("outbox-connect-", "connect.log")

    @property
    def _properties(self) -> Path:
        return self.directory / "worker.properties"

    def prepare(self) -> None:
        """Write the configuration of the worker."""
        self._properties.write_text(
            f"bootstrap.servers={self._bootstrap}\n"
            f"listeners=http://{ports.LOOPBACK}:{self.port}\n"
            f"offset.storage.file.filename={self.directory}/offsets\n"
            "offset.flush.interval.ms=200\n"
            "key.converter=org.apache.kafka.connect.json.JsonConverter\n"
            "value.converter=org.apache.kafka.connect.json.JsonConverter\n"
        )

    def command(self) -> Sequence[str]:
        """Return the command line of the worker."""
        return [
            *self._java, "-cp", f"{self._libraries}/*",
            "org.apache.kafka.connect.cli.ConnectStandalone", str(self._properties),
        ]  # fmt: skip

    def answers(self) -> bool:
        """Return True if the REST interface answers."""
        try:
            with urllib.request.urlopen(f"http://{ports.LOOPBACK}:{self.port}/", timeout=2):
                return True
        except OSError:
            return False

    def connect(self, name: str, config: Mapping[str, str]) -> None:
        """Create a connector, or change its configuration, and wait until its task runs."""
        self.ask("PUT", f"/connectors/{name}/config", config)
        self.await_state(name, "RUNNING")

    def stop(self, name: str) -> None:
        """Stop a connector; it keeps its offsets."""
        self.ask("PUT", f"/connectors/{name}/stop")
        self.await_state(name, "STOPPED")

    def resume(self, name: str) -> None:
        """Resume a stopped connector."""
        self.ask("PUT", f"/connectors/{name}/resume")
        self.await_state(name, "RUNNING")

    def remove(self, name: str) -> None:
        """Remove a connector; its replication slot stays."""
        self.ask("DELETE", f"/connectors/{name}")

    def config(self, name: str) -> Mapping[str, str]:
        """Return the configuration of a connector as reported by the worker."""
        return self.ask("GET", f"/connectors/{name}/config")

    def await_state(self, name: str, state: str) -> None:
        """Wait until a connector and its task, if any, have this state. Raise AssertionError if one of them failed."""

        def is_so() -> bool:
            found = self.ask("GET", f"/connectors/{name}/status")
            parts = [found["connector"], *found["tasks"]]
            assert all(part["state"] != "FAILED" for part in parts), f"{name}: {self.words()}"
            return all(part["state"] == state for part in parts) and (len(parts) == 2) == (state == "RUNNING")

        until(is_so, seconds=START_SECONDS, what=f"connector {name} is {state}")

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request and return the parsed answer, None if it is empty. Retry after 404 and 409."""
        answer: list[Any] = []

        def is_answered() -> bool:
            request = urllib.request.Request(
                f"http://{ports.LOOPBACK}:{self.port}{path}",
                method=method,
                data=None if body is None else json.dumps(body).encode(),
                headers={"content-type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=REST_SECONDS) as found:  # noqa: S310 - our own worker
                    text = found.read()
            except urllib.error.HTTPError as error:
                with error:
                    if error.code in (404, 409):
                        return False
                    raise AssertionError(f"{method} {path}: {error.read().decode()}") from None
            answer.append(json.loads(text) if text else None)
            return True

        until(is_answered, seconds=START_SECONDS, what=f"{method} {path} is answered")
        return answer[0]

    def words(self) -> str:
        """Return the end of the worker's log."""
        return self.log.read_text()[-6000:]
