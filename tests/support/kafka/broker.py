"""One broker for tests: a real Apache Kafka node, or a substitute from a wheel where Java or Maven is missing."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.embedded.broker import PARTITIONS, Broker
from tests.support.kafka import records
from tests.support.kafka.jars import NoKafka, jars
from tests.support.kafka.records import Record
from tests.support.kafka.topics import Administration

FORMAT_SECONDS = 60
CLUSTER_ID = "outboxRelayTestsClustr"
QUICK_START = ("-XX:TieredStopAtLevel=1",)
"""Options of Java for a broker that starts on few cores and needs no optimizing compiler."""
JAVA = ("java", "-XX:-UsePerfData", "-Xmx512m", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")


class KafkaBroker(Broker):
    """One broker in a temporary directory, on a free port of the loopback address.

    `settings` are added to Kafka's settings, such as `{"message.max.bytes": "20000"}`, and `java` to the options of the
    virtual machine. Where Java or Maven is missing, the demo's broker is the substitute. With the environment variable
    CI set to `true` there is no substitute, and :class:`NoKafka` is raised.

    As a context manager it is created, started, and removed at the end.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, *, java: tuple[str, ...] = ()) -> None:
        self._libraries = _libraries()
        super().__init__()
        self.controller_port = ports.free_port()
        self._settings = dict(settings or {})
        self._without: tuple[str, ...] = ()
        self.java = java

    @property
    def real(self) -> bool:
        """Return True for Apache Kafka, False for the substitute."""
        return self._libraries is not None

    def command(self) -> Sequence[str]:
        """Return the command that starts the broker."""
        if self._libraries is None:
            return super().command()
        return [*JAVA, *self.java, "-cp", f"{self._libraries}/*", "kafka.Kafka", str(self._properties)]

    def create_topic(self, name: str, partitions: int = PARTITIONS, config: Mapping[str, str] | None = None) -> None:
        """Create a topic with the settings `config` and wait until it can be used."""
        Administration(self.bootstrap).create_topic(name, partitions, config=config)

    def set_quota(self, producer_byte_rate: int) -> None:
        """Limit the bytes per second of each client. librdkafka's admin client cannot."""
        quota = ("--add-config", f"producer_byte_rate={producer_byte_rate}", "--entity-type", "clients")
        tool = (*JAVA, *QUICK_START, "-cp", f"{self._libraries}/*", "kafka.admin.ConfigCommand")
        command = [*tool, "--bootstrap-server", self.bootstrap, "--alter", *quota, "--entity-default"]
        subprocess.run(command, check=True, capture_output=True, timeout=FORMAT_SECONDS)

    def stop(self) -> None:
        """Shut the broker down gracefully if it is running."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Stop and start again on the same port. Apache Kafka keeps its data."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Suspend the broker's process (SIGSTOP): connections stay open and get no answers."""
        if self._process is not None:
            self._process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume a frozen broker."""
        if self._process is not None:
            self._process.send(signal.SIGCONT)

    @contextlib.contextmanager
    def frozen(self) -> Generator[None]:
        """Freeze the broker for the length of a `with` block."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def consume(
        self,
        topic: str,
        *,
        count: int | None = None,
        enough: Callable[[Sequence[Record]], bool] | None = None,
        seconds: float = 30,
    ) -> list[Record]:
        """See :func:`tests.support.kafka.records.consume`."""
        return records.consume(self.bootstrap, topic, count=count, enough=enough, seconds=seconds)

    def read_all(self, topic: str, *, seconds: float = 30) -> list[Record]:
        """See :func:`tests.support.kafka.records.read_all`."""
        return records.read_all(self.bootstrap, topic, seconds=seconds)

    @property
    def _properties(self) -> Path:
        return self.directory / "server.properties"

    def add_settings(self, settings: Mapping[str, str], *without: str) -> None:
        """Add to Kafka's settings and omit some, before the start."""
        self._settings |= settings
        self._without += without

    def prepare(self) -> None:
        """Write the settings and format the data directory of Apache Kafka; the substitute has neither."""
        if self._libraries is None:
            return
        settings = {**_kafka_settings(self.port, self.controller_port, self.directory / "data"), **self._settings}
        lines = [f"{name}={value}\n" for name, value in settings.items() if name not in self._without]
        self._properties.write_text("".join(lines))
        alone = [] if "controller.quorum.voters" in settings else ["--standalone"]
        command = [
            *JAVA, *QUICK_START, "-cp", f"{self._libraries}/*", "kafka.tools.StorageTool", "format", *alone,
            "--cluster-id", CLUSTER_ID, "--config", str(self._properties),
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=self.directory, check=False, capture_output=True, text=True, timeout=FORMAT_SECONDS
        )
        if done.returncode != 0:
            raise RuntimeError(f"Kafka's storage could not be formatted: {done.stdout}{done.stderr}")


def _libraries() -> Path | None:
    """Return the directory of Kafka's jars, or None for the substitute."""
    try:
        return jars()
    except NoKafka as reason:
        if os.environ.get("CI") == "true":
            raise
        sys.stderr.write(f"\nno Apache Kafka, using the substitute from a wheel: {reason}\n")
        return None


def _kafka_settings(port: int, controller_port: int, data: Path) -> dict[str, str]:
    """Return the settings of a node that is broker and controller (KRaft), without replication."""
    listeners = f"PLAINTEXT://{ports.LOOPBACK}:{port},CONTROLLER://{ports.LOOPBACK}:{controller_port}"
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.bootstrap.servers": f"{ports.LOOPBACK}:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": listeners,
        "advertised.listeners": listeners,
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(data),
        "log.cleaner.enable": "false",
        "num.partitions": str(PARTITIONS),
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
    }
