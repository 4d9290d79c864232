"""Schemas from a registry that speaks Confluent's API. Needs the extra ``registry``, which brings the client."""

from __future__ import annotations

import queue
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import urlsplit

from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from outbox_relay.domain.files import read_file, system_authorities
from outbox_relay.sinks.kafka.delivery import Encoder
from outbox_relay.sinks.kafka.encoders import Format, FoundSchema, References, is_too_deep, make_encoder
from outbox_relay.sinks.kafka.schemas import SchemasUnavailable, SchemaUnusable, Subject
from outbox_relay.sinks.tls import Tls, verify_alike

MAX_THREADS = 4
"""Maximum number of reads under way, with those whose answers are no longer awaited."""
MAX_FILE_BYTES = 1_048_576
MAX_ID = 2**31 - 1
NOT_A_REGISTRY = "the answer is not that of a registry; is the path in url right?"

SchemaType: TypeAlias = Literal["AVRO", "JSON", "PROTOBUF"]
TYPES: Mapping[Format, SchemaType] = {"avro": "AVRO", "json": "JSON", "protobuf": "PROTOBUF"}
Answer: TypeAlias = tuple[Subject, Encoder | SchemaUnusable]
Answers: TypeAlias = "queue.Queue[Answer | SchemasUnavailable | None]"
"""The answers that a thread reads, in order. The last one is the reason why the rest is missing, or None."""


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """The settings of a schema registry."""

    urls: str
    """One or several addresses, with commas between them."""
    format: Format
    auto_register: bool = False
    schema_files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Files with the schemas of event types, which are registered or looked up instead of the latest version."""
    user_info: Callable[[], str] | None = None
    """Returns user and password, with a colon between them, or raises ValueError with the reason."""
    ca_file: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None
    timeout_seconds: float = 3.0


def _read(user_info: Callable[[], str]) -> str:
    try:
        return user_info()
    except ValueError as error:
        raise SchemasUnavailable(f"registry.user_info: {error}") from None


class SchemaRegistry:
    """Reads schemas and makes their encoders.

    Each read has a client and a daemon thread of its own: it reads the files of the settings again, nothing stays open
    after it, and the caller's wait ends in time even if a resolver never answers.
    """

    def __init__(self, options: RegistryOptions) -> None:
        self._options = options
        self._urls = [url.strip() for url in options.urls.split(",")]
        self._threads = threading.BoundedSemaphore(MAX_THREADS)

    def read(self, subjects: Sequence[Subject], seconds: float) -> Iterator[Answer]:
        """Yield each subject with the encoder of its newest schema, or with the reason why there is none.

        Without subjects find out if the registry answers. Raise ``SchemasUnavailable`` if it does not answer within
        ``seconds``.
        """
        answers: Answers = queue.Queue()
        abandoned = threading.Event()
        deadline = time.monotonic() + seconds
        if not self._threads.acquire(blocking=False):
            raise self._unavailable("earlier requests have not ended")
        run = partial(self._run, subjects, answers, abandoned)
        threading.Thread(target=run, name="schema registry", daemon=True).start()
        try:
            while (answer := self._next(answers, deadline)) is not None:
                if isinstance(answer, SchemasUnavailable):
                    # The client begins with the first address: another one is the first next time.
                    self._urls.append(self._urls.pop(0))
                    raise answer
                yield answer
        finally:
            abandoned.set()

    def _next(self, answers: Answers, deadline: float) -> Answer | SchemasUnavailable | None:
        try:
            return answers.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            return self._unavailable("no answer in time")

    def _run(self, subjects: Sequence[Subject], answers: Answers, abandoned: threading.Event) -> None:
        try:
            with self._client() as client:
                if not subjects:
                    client.get_schema_types()
                for subject in subjects:
                    if abandoned.is_set():
                        break
                    answers.put((subject, self._answer(client, subject)))
            answers.put(None)
        except SchemaRegistryError as error:
            answers.put(self._unavailable(_status(error)))
        except SchemasUnavailable as reason:
            answers.put(self._unavailable(str(reason)))
        except Exception as error:
            answers.put(self._unavailable(_reason(error)))
        finally:
            self._threads.release()

    def _unavailable(self, reason: str) -> SchemasUnavailable:
        return SchemasUnavailable(f"schema registry {', '.join(map(_shown, self._urls))}: {reason}")

    def _client(self) -> SchemaRegistryClient:
        """Return a new client. Raise ``SchemasUnavailable``, with the setting, for a file that cannot be used."""
        options = self._options
        settings: dict[str, object] = {
            "url": ",".join(self._urls),
            "timeout": options.timeout_seconds,
            "max.retries": 0,
            # By itself the client takes the authorities of certifi, which know no private ones.
            "ssl.ca.location": str(
                options.ca_file or system_authorities() or ssl.get_default_verify_paths().capath or ""
            )
            or None,
        }
        if options.client_certificate is not None:
            settings["ssl.certificate.location"] = str(options.client_certificate)
            settings["ssl.key.location"] = str(options.client_key or options.client_certificate)
            # Without one, OpenSSL asks the terminal for the password of an encrypted key.
            settings["ssl.key.password"] = ""
        try:
            if options.user_info is not None:
                settings["basic.auth.user.info"] = _read(options.user_info)
            client = SchemaRegistryClient(settings)
        except (OSError, ValueError):
            try:
                Tls(options.ca_file, options.client_certificate, options.client_key).context()
            except ValueError as reason:
                raise SchemasUnavailable(f"registry.{reason}") from None
            raise
        # Python 3.13 began to refuse private authorities without key identifiers.
        verify_alike(cast("Any", client)._rest_client.verify)
        return client

    def _answer(self, client: SchemaRegistryClient, subject: Subject) -> Encoder | SchemaUnusable:
        try:
            found = self._find(client, subject)
        except SchemaUnusable as reason:
            return reason
        except SchemaRegistryError as error:
            match _code(error), error.http_status_code:
                case (40401 | 40402 | 40403, _):
                    fault = "has no such subject, version or schema"
                # Answers to a schema that is invalid, or incompatible with earlier versions.
                case (int(), 409 | 422):
                    fault = "refused the schema"
                case _:
                    raise
            return SchemaUnusable(f"subject {subject.name}: the schema registry {fault} ({_status(error)})")
        try:
            return make_encoder(self._options.format, subject.name, subject.record, found)
        except SchemaUnusable as reason:
            return reason
        except Exception as error:
            return SchemaUnusable(f"subject {subject.name}: has an unusable schema ({type(error).__name__})")

    def _find(self, client: SchemaRegistryClient, subject: Subject) -> FoundSchema:
        """Return the newest schema with all schemas that it refers to."""
        form, place = self._options.format, f"subject {subject.name}"
        shape = "serialized" if form == "protobuf" else None
        if (path := self._options.schema_files.get(subject.event_type)) is not None:
            schema = Schema(_text(f'schema_files."{subject.event_type}"', path), TYPES[form])
            register = client.register_schema_full_response if self._options.auto_register else client.lookup_schema
            made = register(subject.name, schema)
            root = RegisteredSchema(subject.name, made.version, made.schema_id, made.guid, schema)
        else:
            root = client.get_latest_version(subject.name, shape)
        _require_usable(root, place)
        if root.schema.schema_type != TYPES[form]:
            raise SchemaUnusable(f"{place}: has a schema of type {root.schema.schema_type}, not {TYPES[form]}")
        references: References = {}
        waiting = [root]
        while waiting:
            for reference in waiting.pop().schema.references or ():
                name, version = str(reference.subject), int(reference.version or 0)
                if (name, version) not in references:
                    references[name, version] = referenced = client.get_version(name, version, True, shape)
                    _require_usable(referenced, place)
                    waiting.append(referenced)
        return FoundSchema(root, references)


def _text(setting: str, path: Path) -> str:
    """Return the text of a file. Raise ``SchemasUnavailable``, with the setting, if it cannot be used."""
    try:
        content = read_file(path, MAX_FILE_BYTES)
        if len(content) <= MAX_FILE_BYTES:
            return content.decode()
        fault = f"is larger than {MAX_FILE_BYTES} bytes"
    except UnicodeDecodeError:
        fault = "is not text in UTF-8"
    except OSError as error:
        fault = str(error.strerror)
    raise SchemasUnavailable(f"registry.{setting}: {path}: {fault}")


def _require_usable(found: RegisteredSchema, place: str) -> None:
    """Raise ``SchemasUnavailable`` for an answer that is not a schema, else ``SchemaUnusable``."""
    schema, number = found.schema, cast("Any", found.schema_id)
    if not (isinstance(schema.schema_str, str) and type(number) is int and 0 <= number <= MAX_ID):
        raise SchemasUnavailable(NOT_A_REGISTRY)
    if schema.rule_set is not None:
        raise SchemaUnusable(f"{place}: its schema has rules, which the relay does not run")
    if is_too_deep(schema.schema_str):
        raise SchemaUnusable(f"{place}: its schema is nested too deeply")


def _code(error: SchemaRegistryError) -> int | None:
    """Return the registry's code of an error, or None if the answer is another server's."""
    code = cast("Any", error.error_code)
    return code if type(code) is int and str(code).startswith(str(error.http_status_code)) else None


def _status(error: SchemaRegistryError) -> str:
    """Return status and code of an answer, whose text may hold anything."""
    status, code = error.http_status_code, _code(error)
    said = f"HTTP status {status}" + ("" if code is None else f", code {code}")
    if status == 404 and code is None:
        return f"{said}: {NOT_A_REGISTRY}"
    return f"{said}: redirects are not followed" if status // 100 == 3 else said


def _shown(url: str) -> str:
    """Return an address without its path."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


def _reason(error: BaseException) -> str:
    """Return a reason without anything of the answer, which messages of HTTP's errors quote."""
    cause = error
    while not isinstance(cause, OSError) and (deeper := cause.__cause__ or cause.__context__) is not None:
        cause = deeper
    match cause if isinstance(cause, OSError) else error:
        case TimeoutError():
            return "no answer in time"
        case ssl.SSLCertVerificationError(verify_message=message):
            return f"its certificate is not accepted: {message}"
        case ssl.SSLError(reason=reason):
            return f"no answer: TLS failed ({(reason or 'unknown').lower().replace('_', ' ')})"
        case OSError(strerror=str(reason)):
            return f"no answer: {reason}"
        case ValueError() | TypeError() | AttributeError() | LookupError() | RecursionError():
            return NOT_A_REGISTRY
        case _:
            return f"no answer ({type(error).__name__})"
