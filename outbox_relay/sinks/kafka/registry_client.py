"""Schemas from a registry that speaks Confluent's API. Needs the extra ``registry``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.file_reading import FileReader, is_stream, probe, read_file, while_reading
from outbox_relay.sinks.kafka.call import Encoder
from outbox_relay.sinks.kafka.event_schemas import SchemasUnavailable, SchemaUnusable, Subject
from outbox_relay.sinks.kafka.schema_encoders import Format, FoundSchema, References, make_encoder

T = TypeVar("T")

MAX_STUCK = 4
"""Maximum number of requests that did not end in time and may still run."""
MAX_REFERENCES = 200
"""Maximum number of schemas that one schema refers to, directly or not."""
MAX_FILE_BYTES = 1_048_576
WAIT_SECONDS = 0.05
"""Interval at which a waiting call looks whether it was withdrawn."""
NOT_FOUND = 404
REFUSED_LOGIN = (401, 403)

SchemaType: TypeAlias = Literal["AVRO", "JSON", "PROTOBUF"]
TYPES: Mapping[Format, SchemaType] = {"avro": "AVRO", "json": "JSON", "protobuf": "PROTOBUF"}


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """The settings of a schema registry."""

    urls: str
    """One or several addresses, with commas between them."""
    format: Format
    auto_register: bool = False
    schema_files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Files with the schemas of event types, which are registered or looked up instead of the latest version."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    ca_file: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None
    timeout_seconds: float = 3.0

    @property
    def shown(self) -> str:
        """Return the addresses without their paths."""
        parts = (urlsplit(url.strip()) for url in self.urls.split(","))
        return ", ".join(f"{each.scheme}://{each.hostname}" + (f":{each.port}" if each.port else "") for each in parts)


class RegistryClient:
    """Asks a registry for schemas, each time in a thread of its own, so that a wait always ends.

    Files are opened by ``reader``: the password at the first request and after one that the registry refused.
    """

    def __init__(self, options: RegistryOptions, reader: FileReader) -> None:
        self._options = options
        self._reader = reader
        self._client: SchemaRegistryClient | None = None
        self._stuck: list[Future[object]] = []

    def encoder(self, subject: Subject, seconds: float, cancelled: Callable[[], bool]) -> Encoder:
        """Return the encoder of the newest schema. Raise ``SchemasUnavailable`` or ``SchemaUnusable``."""
        try:
            found = self._ask(lambda client: self._find(client, subject), seconds, cancelled, subject.name)
            return make_encoder(self._options.format, subject.name, subject.record, found)
        except (SchemasUnavailable, SchemaUnusable):
            raise
        except Exception as error:
            raise SchemaUnusable(f"subject {subject.name}: has an unusable schema ({type(error).__name__})") from None

    def probe(self, seconds: float) -> None:
        """Raise ``SchemasUnavailable`` if the registry does not answer."""
        try:
            self._ask(lambda client: client.get_schema_types(), seconds, lambda: False, None)
        except SchemaUnusable as reason:
            raise SchemasUnavailable(str(reason)) from None

    def _find(self, client: SchemaRegistryClient, subject: Subject) -> FoundSchema:
        """Return the newest schema with all schemas that it refers to. Blocks."""
        form = self._options.format
        serialized = "serialized" if form == "protobuf" else None
        if (path := self._options.schema_files.get(subject.event_type)) is not None:
            own = Schema(self._read(f'schema_files."{subject.event_type}"', path, MAX_FILE_BYTES), TYPES[form])
            register = client.register_schema_full_response if self._options.auto_register else client.lookup_schema
            answer = register(subject.name, own)
            root = RegisteredSchema(subject.name, answer.version, answer.schema_id, answer.guid, own)
        else:
            root = client.get_latest_version(subject.name, serialized)
        if (root.schema.schema_type or "AVRO") != TYPES[form]:
            kind = root.schema.schema_type or "AVRO"
            raise SchemaUnusable(f"subject {subject.name}: has a schema of type {kind[:20]}, not {TYPES[form]}")
        if root.schema.rule_set is not None:
            raise SchemaUnusable(f"subject {subject.name}: its schema has rules, which the relay does not run")
        references: References = {}
        self._find_references(client, root.schema, serialized, references)
        return FoundSchema(root, references)

    def _find_references(
        self, client: SchemaRegistryClient, schema: Schema, form: str | None, found: References
    ) -> None:
        for reference in schema.references or ():
            place = (str(reference.subject), int(reference.version or 0))
            if place in found:
                continue
            if len(found) >= MAX_REFERENCES:
                raise SchemaUnusable(f"refers to more than {MAX_REFERENCES} schemas")
            found[place] = referenced = client.get_version(*place, True, form)
            self._find_references(client, referenced.schema, form, found)

    # -- requests -----------------------------------------------------------------------------------------------

    def _ask(
        self,
        question: Callable[[SchemaRegistryClient], T],
        seconds: float,
        cancelled: Callable[[], bool],
        subject: str | None,
    ) -> T:
        """Return the answer to ``question``. Raise ``SchemasUnavailable`` or, for one subject, ``SchemaUnusable``."""
        self._stuck = [each for each in self._stuck if not each.done()]
        if len(self._stuck) >= MAX_STUCK:
            raise self._unavailable("earlier requests have not ended")
        running = Future[T]()
        client = self._client or self._open()
        threading.Thread(target=_run, args=(running, question, client), name="schema registry", daemon=True).start()
        try:
            return _result(running, min(seconds, self._options.timeout_seconds), cancelled)
        except TimeoutError:
            self._client = None
            self._stuck.append(running)  # pyright: ignore[reportArgumentType] - a future is read only
            raise self._unavailable("no answer in time") from None
        except SchemaRegistryError as error:
            raise self._refusal(error, subject) from None
        except (SchemaUnusable, ConfigurationError) as error:
            raise SchemaUnusable(str(error)) from None
        except Exception as error:
            self._client = None
            raise self._unavailable(f"no answer ({type(error).__name__})") from None

    def _refusal(self, error: SchemaRegistryError, subject: str | None) -> Exception:
        """Return what the status of an answer means. The answer's text may hold anything, so it is left out."""
        status, code = error.http_status_code, error.error_code
        said = f"HTTP status {status}" + (f", code {code}" if str(code).isdigit() else "")
        if subject is None or status in REFUSED_LOGIN or status == 429 or status >= 500 or status < 400:
            self._client = None
            return self._unavailable(said)
        if status == NOT_FOUND:
            return SchemaUnusable(f"subject {subject}: the schema registry has no such subject or version ({said})")
        return SchemaUnusable(f"subject {subject}: the schema registry refused the request ({said})")

    def _unavailable(self, reason: str) -> SchemasUnavailable:
        return SchemasUnavailable(f"schema registry {self._options.shown}: {reason}")

    def _open(self) -> SchemaRegistryClient:
        try:
            self._client = client = self._reader.call(lambda: SchemaRegistryClient(self._configuration()))
        except ConfigurationError as reason:
            raise self._unavailable(str(reason)) from None
        except Exception as error:
            # The text may name a file's contents or the password.
            raise self._unavailable(f"cannot use its certificates ({type(error).__name__})") from None
        return client

    def _configuration(self) -> dict[str, str | int | float]:
        options = self._options
        found: dict[str, str | int | float] = {
            "url": options.urls,
            "timeout": options.timeout_seconds,
            "max.retries": 0,
            # The sink remembers the latest versions itself.
            "cache.latest.ttl.sec": 0,
        }
        if options.username is not None:
            password = options.password or ""
            if options.password_file is not None:
                password = self._read("password_file", options.password_file, 65_536)
            found["basic.auth.user.info"] = f"{options.username}:{password}"
        locations = {
            "ssl.ca.location": options.ca_file,
            "ssl.certificate.location": options.client_certificate,
            "ssl.key.location": options.client_key,
        }
        for name, path in locations.items():
            if path is not None:
                with while_reading(f"registry {name}"):
                    if is_stream(path):
                        raise ConfigurationError(f"{path} is neither a regular file nor a directory")
                    probe(path)
                found[name] = str(path)
        return found

    def _read(self, setting: str, path: Path, limit: int) -> str:
        try:
            with while_reading(f"registry.{setting}"):
                content = self._reader.call(lambda: read_file(path, limit))
            if len(content) > limit:
                raise ConfigurationError(f"{setting}: {path} is larger than {limit} bytes")
            return content.decode().removesuffix("\n").removesuffix("\r")
        except OSError as error:
            raise ConfigurationError(f"{setting}: {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigurationError(f"{setting}: {path} is not text in UTF-8") from None


def _run(running: Future[T], question: Callable[[SchemaRegistryClient], T], client: SchemaRegistryClient) -> None:
    try:
        running.set_result(question(client))
    except BaseException as error:
        running.set_exception(error)


def _result(running: Future[T], seconds: float, cancelled: Callable[[], bool]) -> T:
    """Return the result. Raise TimeoutError after ``seconds``, or when the caller is withdrawn."""
    deadline = time.monotonic() + seconds
    while True:
        remaining = deadline - time.monotonic()
        try:
            return running.result(max(min(remaining, WAIT_SECONDS), 0.0))
        except TimeoutError:
            if running.done() or remaining <= 0 or cancelled():
                raise
