"""Schemas from a registry that speaks Confluent's API. Needs the extra ``registry``."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast
from urllib.parse import quote, urlsplit

from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaReference

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.file_reading import FileReader, read_file, while_reading
from outbox_relay.sinks.kafka.call import Encoder
from outbox_relay.sinks.kafka.encoder_base import FoundSchema, References
from outbox_relay.sinks.kafka.event_schemas import SchemasUnavailable, SchemaUnusable, Subject
from outbox_relay.sinks.kafka.json_depth import is_too_deep
from outbox_relay.sinks.kafka.registry_requests import NoAnswer, RegistryAnswer, RegistryConnection
from outbox_relay.sinks.kafka.schema_encoders import Format, encoders_of, make_encoder
from outbox_relay.sinks.tls import Tls

MAX_THREADS = 4
"""Maximum number of requests under way, with those whose answer is no longer awaited."""
MAX_REFERENCES = 200
"""Maximum number of schemas that one schema refers to, directly or not."""
MAX_SCHEMA_BYTES = 4 * 1024 * 1024
"""Maximum size of a schema together with those that it refers to."""
MAX_FILE_BYTES = 1_048_576
MAX_PASSWORD_BYTES = 65_536
MAX_ID = 2**31 - 1
MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"
OK = 200
REDIRECTS = range(300, 400)
MISSING = (40401, 40402, 40403)
"""The registry's codes for a subject, a version and a schema that it does not have."""
REFUSED_SCHEMA = (409, 422)
"""Statuses of answers to a schema that is invalid, or incompatible with earlier versions."""

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
    def addresses(self) -> list[str]:
        """Return the addresses."""
        return [url.strip() for url in self.urls.split(",")]


class _Access(NamedTuple):
    """The contents of the files that the settings name."""

    headers: Mapping[str, str]
    tls: ssl.SSLContext | None


class RegistryClient:
    """Asks a registry for schemas. Each inquiry has a connection of its own; between inquiries nothing is open.

    Files are opened by ``reader``: password and certificates at the first inquiry, and again after one that failed.
    Raise ImportError without the packages of the format.
    """

    def __init__(self, options: RegistryOptions, reader: FileReader) -> None:
        self._options = options
        self._reader = reader
        self._access: _Access | None = None
        self._threads = threading.BoundedSemaphore(MAX_THREADS)
        self._addresses = options.addresses
        self.make = encoders_of(options.format)

    def inquire(self, until: float, cancelled: Callable[[], bool]) -> RegistryInquiry:
        """Return an inquiry, to be closed, that waits until ``until`` in ``time.monotonic()``, or ``cancelled()``."""
        return RegistryInquiry(self, self._options, until, cancelled)

    def access(self) -> _Access:
        """Return the contents of the files. Raise ``SchemasUnavailable`` if one cannot be used."""
        if (access := self._access) is None:
            try:
                self._access = access = self._reader.call(self._read_access)
            except (ConfigurationError, ValueError) as reason:
                raise SchemasUnavailable(f"registry.{reason}") from None
        return access

    def _read_access(self) -> _Access:
        options = self._options
        headers = {"accept": MEDIA_TYPE, "content-type": MEDIA_TYPE, "user-agent": "outbox-relay"}
        if options.username is not None:
            password = options.password or ""
            if options.password_file is not None:
                password = self.read("password_file", options.password_file, MAX_PASSWORD_BYTES)
            login = base64.b64encode(f"{options.username}:{password}".encode()).decode()
            headers["authorization"] = f"Basic {login}"
        needs_tls = any(urlsplit(url).scheme == "https" for url in self._addresses)
        tls = Tls(options.ca_file, options.client_certificate, options.client_key)
        return _Access(headers, tls.context() if needs_tls else None)

    def read(self, setting: str, path: Path, limit: int) -> str:
        """Return the text of a file. Raise ``ConfigurationError`` if it cannot be used."""
        try:
            with while_reading(f"registry.{setting}"):
                content = self._reader.call(lambda: read_file(path, limit))
            if len(content) > limit:
                raise ConfigurationError(f"{setting}: {path} is larger than {limit} bytes")
            return content.decode().removesuffix("\n").removesuffix("\r")
        except OSError as error:
            raise ConfigurationError(f"{setting}: {path}: {error.strerror}") from None
        except ValueError as error:
            fault = "is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else "is no path of a file"
            raise ConfigurationError(f"{setting}: {path} {fault}") from None

    def connect(self, url: str) -> RegistryConnection:
        """Return a connection, opened by its first request. Raise ``SchemasUnavailable`` for an unusable file."""
        access = self.access()
        return RegistryConnection(url, access.headers, access.tls, self._threads)

    def addresses(self) -> list[str]:
        """Return the addresses in the order in which they are to be asked."""
        return self._addresses

    def failed(self, url: str) -> None:
        """Have the files read again, and ask ``url`` after all others."""
        self._access = None
        self._addresses = [*(other for other in self._addresses if other != url), url]


class RegistryInquiry:
    """A few requests in a row, over one connection."""

    def __init__(
        self, client: RegistryClient, options: RegistryOptions, until: float, cancelled: Callable[[], bool]
    ) -> None:
        self._client = client
        self._options = options
        self._until = until
        self._cancelled = cancelled
        self._open: tuple[str, RegistryConnection] | None = None

    def encoder(self, subject: Subject) -> Encoder:
        """Return the encoder of the newest schema. Raise ``SchemasUnavailable`` or ``SchemaUnusable``."""
        try:
            return make_encoder(self._client.make, subject.name, subject.record, self._find(subject))
        except (SchemasUnavailable, SchemaUnusable):
            raise
        except Exception as error:
            raise SchemaUnusable(f"subject {subject.name}: has an unusable schema ({type(error).__name__})") from None

    def probe(self) -> None:
        """Raise ``SchemasUnavailable`` if the registry does not answer."""
        try:
            self._ask("/schemas/types", None, "types of schemas")
        except SchemaUnusable as reason:
            raise SchemasUnavailable(str(reason)) from None

    def close(self) -> None:
        """Close the connection."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _find(self, subject: Subject) -> FoundSchema:
        """Return the newest schema with all schemas that it refers to."""
        form, place = self._options.format, f"subject {subject.name}"
        versions = f"/subjects/{quote(subject.name, safe='')}"
        if (path := self._options.schema_files.get(subject.event_type)) is not None:
            try:
                text = self._client.read(f'schema_files."{subject.event_type}"', path, MAX_FILE_BYTES)
            except ConfigurationError as reason:
                raise SchemasUnavailable(f"registry.{reason}") from None
            body = json.dumps({"schema": text, "schemaType": TYPES[form]}).encode()
            registering = f"{versions}/versions" if self._options.auto_register else versions
            answer = self._ask(registering, body, place)
            root = _registered({**answer, "schema": text, "schemaType": TYPES[form]}, subject.name)
        else:
            root = _registered(
                self._ask(f"{versions}/versions/latest{self._serialized('?')}", None, place), subject.name
            )
        if root.schema.schema_type != TYPES[form]:
            raise SchemaUnusable(f"{place}: has a schema of type {root.schema.schema_type}, not {TYPES[form]}")
        references: References = {}
        self._find_references(place, root, references)
        return FoundSchema(root, references)

    def _find_references(self, place: str, root: RegisteredSchema, found: References) -> None:
        size, waiting = 0, [root]
        while waiting:
            text = waiting[-1].schema.schema_str or ""
            size += len(text)
            if size > MAX_SCHEMA_BYTES:
                raise SchemaUnusable(f"{place}: its schema, with those it refers to, is larger than {MAX_SCHEMA_BYTES}")
            if is_too_deep(text):
                raise SchemaUnusable(f"{place}: its schema is nested too deeply")
            for reference in waiting.pop().schema.references or ():
                name, version = str(reference.subject), int(reference.version or 0)
                if (name, version) in found:
                    continue
                if len(found) >= MAX_REFERENCES:
                    raise SchemaUnusable(f"{place}: its schema refers to more than {MAX_REFERENCES} schemas")
                path = f"/subjects/{quote(name, safe='')}/versions/{version}?deleted=true{self._serialized('&')}"
                found[name, version] = referenced = _registered(self._ask(path, None, place), name)
                waiting.append(referenced)

    def _serialized(self, separator: str) -> str:
        return f"{separator}format=serialized" if self._options.format == "protobuf" else ""

    # -- requests -----------------------------------------------------------------------------------------------

    def _ask(self, path: str, body: bytes | None, place: str) -> Mapping[str, Any]:
        """Return the answer of the first address that gives one, an object of JSON, or a list as one without keys.

        Raise ``SchemasUnavailable`` or, for one subject, ``SchemaUnusable``.
        """
        reason = SchemasUnavailable("schema registry: no address")
        for url in list(self._client.addresses()):
            try:
                return _understood(self._request(url, path, body), place)
            except (NoAnswer, SchemasUnavailable) as error:
                self.close()
                self._client.failed(url)
                reason = SchemasUnavailable(f"schema registry {_shown(url)}: {error}")
            if self._cancelled() or time.monotonic() >= self._until:
                break
        raise reason

    def _request(self, url: str, path: str, body: bytes | None) -> RegistryAnswer:
        if self._open is None or self._open[0] != url:
            self.close()
            self._open = url, self._client.connect(url)
        seconds = min(self._options.timeout_seconds, self._until - time.monotonic())
        return self._open[1].ask(path, body, seconds, self._cancelled)


def _shown(url: str) -> str:
    """Return an address without its path."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


def _understood(answer: RegistryAnswer, place: str) -> Mapping[str, Any]:
    """Return the object of an answer. Its text may hold anything, so that reasons have numbers of it only."""
    content = _loaded(answer.body)
    if answer.status == OK and content is not None:
        return content
    code = None if content is None else content.get("error_code")
    known = type(code) is int and str(code).startswith(str(answer.status))
    said = f"HTTP status {answer.status}" + (f", code {str(code)[:8]}" if known else "")
    if known and code in MISSING:
        raise SchemaUnusable(f"{place}: the schema registry has no such subject, version or schema ({said})")
    if known and answer.status in REFUSED_SCHEMA:
        raise SchemaUnusable(f"{place}: the schema registry refused the schema ({said})")
    if answer.status in REDIRECTS:
        raise SchemasUnavailable(f"{said}: redirects are not followed")
    if answer.status == OK or (answer.status == 404 and not known):
        raise SchemasUnavailable(f"{said}: the answer is not that of a registry; is the path in url right?")
    raise SchemasUnavailable(said)


def _loaded(body: bytes) -> Mapping[str, Any] | None:
    try:
        text = body.decode()
        content = None if is_too_deep(text) else json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(content, list):
        return {}
    return cast("Mapping[str, Any]", content) if isinstance(content, dict) else None


def _registered(answer: Mapping[str, Any], subject: str) -> RegisteredSchema:
    """Return a schema. Raise ``SchemasUnavailable`` for an answer that is not one, else ``SchemaUnusable``."""
    number, text, kind = answer.get("id"), answer.get("schema"), answer.get("schemaType") or "AVRO"
    version, references = answer.get("version"), cast("list[Any]", answer.get("references") or [])
    if not (_is_number(number) and isinstance(text, str) and (version is None or _is_number(version))):
        raise SchemasUnavailable("schema registry: the answer is not a schema")
    if kind not in TYPES.values():
        raise SchemaUnusable(f"subject {subject}: has a schema of an unknown type")
    if answer.get("ruleSet") is not None:
        raise SchemaUnusable(f"subject {subject}: its schema has rules, which the relay does not run")
    try:
        named = [_reference(each) for each in references]
    except (TypeError, KeyError):
        raise SchemaUnusable(f"subject {subject}: its schema has references that cannot be read") from None
    return RegisteredSchema(subject, version, number, None, Schema(text, cast("str", kind), named))


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID


def _reference(value: Mapping[str, Any]) -> SchemaReference:
    """Return a reference. Raise TypeError or KeyError if ``value`` is none."""
    name, subject, version = value["name"], value["subject"], value["version"]
    if not (isinstance(name, str) and isinstance(subject, str) and _is_number(version)):
        raise TypeError
    return SchemaReference(name, subject, version)
