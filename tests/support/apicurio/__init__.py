"""A schema registry for tests: Apicurio Registry, in a process of its own, with its schemas in a file of H2."""

import base64
import fcntl
import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.embedded.server import Server
from tests.support import maven

POM = Path(__file__).with_name("pom.xml")
JAVA = ("java", "-XX:-UsePerfData", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
PROBE_SECONDS = 2
REQUEST_SECONDS = 30


class NoRegistry(RuntimeError):
    """Apicurio Registry is not available on this machine. The message has the reason and the remedy."""


class SchemaRegistry(Server):
    """A registry on a free port of the loopback address. It keeps its schemas when it is killed and started again."""

    name = "the schema registry"
    start_seconds = 120

    def __init__(self) -> None:
        self._program = unpacked()
        super().__init__("outbox-registry-", "registry.log")

    @property
    def url(self) -> str:
        """Return the address of Confluent's API."""
        return f"http://{ports.LOOPBACK}:{self.port}/apis/ccompat/v7"

    def command(self) -> Sequence[str | Path]:
        """Return the command that starts the registry."""
        settings = {
            "quarkus.http.host": ports.LOOPBACK,
            "quarkus.http.port": str(self.port),
            "quarkus.http.access-log.enabled": "false",
            "apicurio.storage.kind": "sql",
            "apicurio.storage.sql.kind": "h2",
            "apicurio.datasource.url": f"jdbc:h2:file:{self.directory}/schemas",
        }
        [jar] = self._program.glob("*-runner.jar")
        return [*JAVA, *(f"-D{name}={value}" for name, value in settings.items()), "-jar", jar]

    def answers(self) -> bool:
        """Return True if the registry answers a request."""
        try:
            with self.client(PROBE_SECONDS) as client:
                return bool(client.get_schema_types())
        except Exception:
            return False

    def register(self, subject: str, kind: str, schema: object) -> int:
        """Register a schema, and return its id. One of Protobuf is a ``FileDescriptorProto``."""
        if isinstance(schema, FileDescriptorProto):
            text = base64.b64encode(schema.SerializeToString()).decode()
        else:
            text = json.dumps(schema)
        with self.client() as client:
            return client.register_schema(subject, Schema(text, kind))

    def client(self, seconds: int = REQUEST_SECONDS) -> SchemaRegistryClient:
        """Return a new client, to be closed, such as by ``with``."""
        return SchemaRegistryClient({"url": self.url, "timeout": seconds, "max.retries": 0})


def unpacked() -> Path:
    """Return the directory of the program, unpacked in one step beside its archive. Raise :class:`NoRegistry`."""
    if shutil.which("java") is None:
        raise NoRegistry("java is missing: install a Java runtime of version 17 or newer")
    try:
        archives = maven.fetched(POM, "apicurio", "copy")
    except maven.NotFetched as reason:
        raise NoRegistry(str(reason)) from reason
    place = archives / "program"
    with (archives / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            [archive] = archives.glob("*-all.tar.gz")
            with tempfile.TemporaryDirectory(dir=archives) as making, tarfile.open(archive) as inner:
                inner.extractall(Path(making, "all"), filter="data")
                Path(making, "all").rename(place)
    return place


AVRO: Mapping[str, Any] = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "n", "type": "int"},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
JSON_SCHEMA: Mapping[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Order",
    "type": "object",
    "properties": {"n": {"type": "integer"}, "note": {"type": ["null", "string"]}},
    "required": ["n"],
    "additionalProperties": False,
}
"""An order in each format: a number, and perhaps a note."""


def protobuf() -> FileDescriptorProto:
    """Return the file of the same order in Protobuf, behind another message."""
    file = FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    file.message_type.add(name="Other").field.add(name="x", number=1, type=9, label=1)
    message = file.message_type.add(name="Order")
    message.field.add(name="n", number=1, type=5, label=1)
    message.field.add(name="note", number=2, type=9, label=1)
    return file
