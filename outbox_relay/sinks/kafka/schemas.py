"""The schemas of events, by confluent-kafka's client of a schema registry and its serializers.

Requests are made in the thread of the sink, and each of their steps has a time limit. Messages of the libraries quote
values and answers, so the reasons given here have names of the schema and classes of exceptions only. Needs the extra
``registry``.
"""

from __future__ import annotations

import base64
import json
import math
import random
import re
import ssl
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urlsplit

from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from fastavro.schema import parse_schema
from fastavro.validation import ValidationError, validate
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message_factory import GetMessageClass
from httpx2 import HTTPError
from jsonschema.validators import validator_for

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.files import system_authorities
from outbox_relay.domain.outcomes import Refused, Unavailable
from outbox_relay.sinks.kafka.checks import ClusterUnavailable
from outbox_relay.sinks.tls import Tls, verify_alike

if TYPE_CHECKING:
    from outbox_relay.settings.kafka import RegistrySettings

MAX_SUBJECTS = 1_000
"""Maximum number of subjects remembered, with their serializers."""
STALE_SECONDS = 10.0
"""Time for which no known subject is asked for again after the registry did not answer."""
MISSING_SECONDS = 1.0
"""Time for which a subject without a usable schema is not asked for again, doubled each time."""
MAX_MISSING_SECONDS = 60.0
MAX_DEPTH = 100
"""Maximum number of arrays and objects in each other. What encodes them recurses, some of it in C without a limit."""
TIMEOUT_SECONDS = 3.0
"""Maximum time of one step of a request: connecting, writing, reading."""
CACHE_SECONDS = 300.0
"""Time after which the latest version of a subject is asked for again."""
MISSING_CODES = (40401, 40402, 40403)
"""The registry's codes of a subject, version or schema that does not exist."""
NOT_A_REGISTRY = "the answer is not that of a registry; is the path in url right?"

_FAILED = re.compile(r"Failed to parse (\w+) field: ")


class SchemasUnavailable(ClusterUnavailable):
    """The registry gives no schemas now. The message says why, without secrets."""


class SchemaMissing(Exception):
    """The registry has no schema for a subject, or none that the sink can use. The message says why."""


class Subject(NamedTuple):
    """A subject in the registry, and the name of the record or message that its events are."""

    name: str
    record: str | None


class Serializer(NamedTuple):
    """Makes the values of records that have one schema. ``prepare`` turns JSON into what ``serialize`` takes."""

    content_type: str
    schema: RegisteredSchema
    prepare: Callable[[Any, bytes], Any]
    serialize: Callable[[Any, SerializationContext], bytes | None]

    def encode(self, topic: str, payload: bytes) -> bytes:
        """Return the value for ``payload``. Raise ValueError, without any value of it, if it does not fit."""
        try:
            value = _shallow(json.loads(payload.decode(), parse_float=_finite, parse_constant=_finite), MAX_DEPTH)
            encoded = self.serialize(self.prepare(value, payload), SerializationContext(topic, MessageField.VALUE))
        except Exception as error:
            version = f", version {self.schema.version}" if self.schema.version else ""
            reason = f"does not fit the schema of subject {self.schema.subject}{version}"
            raise ValueError(f"{reason}: {self._place(error)}{type(error).__name__}") from None
        if encoded is None:
            raise ValueError(f"the format of subject {self.schema.subject} has no value for null")
        return encoded

    def _place(self, error: Exception) -> str:
        """Return the field that does not fit, or the part of the schema that it breaks. Keys of maps are hidden."""
        if isinstance(error, ValidationError):
            text = self.schema.schema.schema_str or ""
            fields = str(cast("Any", error).errors[0].field or "").split(".")
            shown = ".".join(each if each in text else "…" for each in fields)
            return f"field {shown}: "
        if isinstance(error, ParseError):
            names, text = list[str](), str(error)
            while found := _FAILED.match(text):
                names.append(found[1])
                text = text[found.end() :]
            return f"field {'.'.join(names)}: " if names else ""
        broken: Sequence[object] = getattr(error.__context__, "absolute_schema_path", ())
        return f"{'/'.join(map(str, broken))}: " if broken else ""


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


def _shallow(value: Any, depth: int) -> Any:
    """Return ``value``. Raise RecursionError if it has more than ``depth`` arrays and objects in each other."""
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise RecursionError
    for each in cast("list[Any]", value) if isinstance(value, list) else cast("dict[str, Any]", value).values():
        _shallow(each, depth - 1)
    return cast("Any", value)


# -- the serializers of the formats ------------------------------------------------------------------------------------


def _avro(client: SchemaRegistryClient, found: RegisteredSchema, conf: dict[str, Any], _: str | None) -> Serializer:
    named: dict[str, Any] = {}
    parsed: Any = None
    for schema in (*_references(client, found.schema).values(), found.schema):
        parsed = parse_schema(json.loads(schema.schema_str or ""), named_schemas=named)

    def prepare(value: Any, _payload: bytes) -> Any:
        validate(value, parsed, strict=True)  # the writer takes what it can turn into a type, such as a text for true
        return value

    make = cast("Any", AvroSerializer)
    serialize = make(client, found.schema, conf={**conf, "validate.strict.allow.default": True})
    return Serializer("application/avro", found, prepare, serialize)


def _json(client: SchemaRegistryClient, found: RegisteredSchema, conf: dict[str, Any], _: str | None) -> Serializer:
    contents = json.loads(found.schema.schema_str or "")
    cast("Any", validator_for(contents)).check_schema(contents)
    payloads: list[bytes] = []

    def prepare(value: Any, payload: bytes) -> Any:
        payloads[:] = [payload]
        return value

    # The payload is sent byte for byte: JSON that is written again may differ.
    make = cast("Any", JSONSerializer)
    serialize = make(found.schema, client, conf=conf, json_encode=lambda _value: payloads.pop())  # pyright: ignore[reportUnknownLambdaType]
    return Serializer("application/json", found, prepare, serialize)


def _protobuf(
    client: SchemaRegistryClient, found: RegisteredSchema, conf: dict[str, Any], record: str | None
) -> Serializer:
    pool: Any = DescriptorPool()
    referenced = _references(client, found.schema, "serialized")
    for name, schema in (*referenced.items(), ("default", found.schema)):
        file: Any = FileDescriptorProto.FromString(base64.b64decode(schema.schema_str or "", validate=True))
        file.name = name
        for imported in file.dependency:
            if imported not in referenced:
                _add_known(pool, imported)
        pool.Add(file)
    messages: dict[str, Any] = {
        descriptor.full_name: descriptor
        for each in file.message_type  # pyright: ignore[reportPossiblyUnboundVariable]
        for descriptor in (pool.FindFileByName("default").message_types_by_name[each.name],)
    }
    if not messages or record not in (None, *messages):
        raise SchemaMissing(f"subject {found.subject}: has no message {record or ''} at its top; name it in records")
    make_message: Any = GetMessageClass(messages[record or next(iter(messages))])

    def prepare(value: Any, _payload: bytes) -> Any:
        return ParseDict(value, make_message(), descriptor_pool=pool, max_recursion_depth=MAX_DEPTH)

    serialize = cast("Any", ProtobufSerializer)(make_message, client, conf=conf)
    return Serializer("application/protobuf", found, prepare, serialize)


def _references(client: SchemaRegistryClient, schema: Schema, form: str | None = None) -> dict[str, Schema]:
    """Return by name the schemas that ``schema`` refers to, each after those that it refers to itself."""
    found: dict[str, Schema] = {}
    for reference in schema.references or ():
        each = client.get_version(str(reference.subject), int(reference.version or 0), True, form).schema
        found |= _references(client, each, form)
        found[str(reference.name)] = each
    return found


def _add_known(pool: Any, name: str) -> None:
    """Add a file of Google's or Confluent's, all of which confluent-kafka has imported."""
    file: Any = cast("Any", Default)().FindFileByName(name)
    for imported in file.dependencies:
        _add_known(pool, imported.name)
    pool.AddSerializedFile(file.serialized_pb)


_MAKERS = {"avro": _avro, "json": _json, "protobuf": _protobuf}


# -- the registry ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Answer:
    """The last answer of the registry on a subject. Times are values of ``time.monotonic()``."""

    serializer: Serializer | None
    reason: str
    """Why there is no serializer."""
    asked_at: float
    delay: float
    """Time after which the registry is asked again."""
    since: float
    """The time at which the subject was first found to have no usable schema."""


class EventSchemas:
    """Finds the serializers of events. Used by one thread, except for :meth:`check`.

    While the registry does not answer, the known schemas remain in use. An event whose subject has no usable schema
    waits, and is refused after ``missing_seconds``. ``topic`` is that of all events, if there is only one.
    """

    def __init__(self, settings: RegistrySettings, topic: str | None) -> None:
        self._settings = settings
        self._only = None if topic is None or settings.subject_name_strategy != "topic" else f"{topic}-value"
        """The subject of all events, if there is only one. Without its schema the destination is down."""
        self._answers: dict[Subject, _Answer] = {}

    def serializer(self, topic: str, event: StoredEvent, seconds: float) -> Serializer | Refused | Unavailable:
        """Return the serializer of an event, or its verdict if there is none, after asking the registry if need be.

        Raise ``SchemasUnavailable`` if the subject is not known and the registry does not answer.
        """
        subject, now = self._subject(topic, event.type), time.monotonic()
        answer = self._answers.get(subject)
        # No event is refused by an old answer.
        late = answer is not None and self._is_late(answer, event)
        if answer is None or now >= answer.asked_at + (MISSING_SECONDS if late or self._only else answer.delay):
            answer = self._ask(subject, answer, seconds)
        if answer.serializer is not None:
            return answer.serializer
        if self._is_late(answer, event):
            return Refused(f"{answer.reason}, for {self._settings.missing_seconds:g} s")
        if self._only is not None:
            return Unavailable(answer.reason)
        wait = max(answer.asked_at + answer.delay - now, 0.0) + answer.delay * (0.1 + random.random())  # noqa: S311
        return Unavailable(answer.reason, retry_after_seconds=round(wait, 3), part=f"subject {subject.name}")

    def check(self, topic_of: Callable[[str], str | None], seconds: float) -> str | None:
        """Return why the registry, or a subject of a type in the settings, gives no schema now, or None. Blocks."""
        types = ((topic_of(each), each) for each in self._settings.records)
        by_record = self._settings.subject_name_strategy == "record"
        subjects = {self._subject(topic or "", each) for topic, each in types if topic is not None or by_record}
        if not subjects and self._only is not None:
            subjects = {Subject(self._only, None)}
        try:
            for subject in subjects:
                self._load(subject, seconds)
            if not subjects:
                with self._asking("the registry", seconds) as client:
                    client.get_schema_types()
        except (SchemaMissing, SchemasUnavailable) as reason:
            return str(reason)
        return None

    def _subject(self, topic: str, event_type: str) -> Subject:
        record = self._settings.records.get(event_type)
        match self._settings.subject_name_strategy:
            case "topic":
                return Subject(f"{topic}-value", record)
            case "record":
                return Subject(record or event_type, record or event_type)
            case "topic-record":
                return Subject(f"{topic}-{record or event_type}", record or event_type)

    def _is_late(self, answer: _Answer, event: StoredEvent) -> bool:
        """Return True if the schema was missing, and the event waited for it, for ``missing_seconds``."""
        if answer.serializer is not None:
            return False
        age = (datetime.now(UTC) - event.created_at).total_seconds()
        return min(age, time.monotonic() - answer.since) >= self._settings.missing_seconds

    def _ask(self, subject: Subject, known: _Answer | None, seconds: float) -> _Answer:
        was_missing = known is not None and known.serializer is None
        try:
            answer = _Answer(self._load(subject, seconds), "", 0.0, CACHE_SECONDS, 0.0)
        except SchemaMissing as reason:
            delay = min(2 * known.delay, MAX_MISSING_SECONDS) if known and was_missing else MISSING_SECONDS
            answer = _Answer(None, str(reason), 0.0, delay, known.since if known and was_missing else time.monotonic())
        except SchemasUnavailable:
            if known is None:
                raise
            # A silent registry makes no event dead: the wait for a missing schema begins again.
            answer = _Answer(known.serializer, known.reason, 0.0, STALE_SECONDS, time.monotonic())
        answer.asked_at = time.monotonic()
        if len(self._answers) >= MAX_SUBJECTS:
            del self._answers[next(iter(self._answers))]
        self._answers[subject] = answer
        return answer

    def _load(self, subject: Subject, seconds: float) -> Serializer:
        """Return the serializer of the newest schema. Raise ``SchemaMissing`` or ``SchemasUnavailable``."""
        place, form = f"subject {subject.name}", str(self._settings.format)
        conf: dict[str, Any] = {
            "auto.register.schemas": False,
            "use.latest.version": True,
            "subject.name.strategy": lambda _context, _record: subject.name,  # pyright: ignore[reportUnknownLambdaType]
        }
        with self._asking(place, seconds) as client:
            found = client.get_latest_version(subject.name, "serialized" if form == "protobuf" else None)
            if not isinstance(found.schema.schema_str, str) or type(cast("Any", found.schema_id)) is not int:
                raise self._unavailable(NOT_A_REGISTRY)
            if found.schema.rule_set is not None:
                raise SchemaMissing(f"{place}: its schema has rules, which the relay does not run")
            if found.schema.schema_type != form.upper():
                raise SchemaMissing(f"{place}: has a schema of type {found.schema.schema_type}, not {form.upper()}")
            return _MAKERS[form](client, found, conf, subject.record)

    @contextmanager
    def _asking(self, place: str, seconds: float) -> Generator[SchemaRegistryClient]:
        """Yield a new client. Raise ``SchemaMissing`` or ``SchemasUnavailable`` in place of what it raises.

        It is closed when all is loaded: from then on a serializer finds every schema in the cache of its client.
        """
        try:
            with self._client(seconds) as client:
                yield client
        except SchemaRegistryError as error:
            code = cast("Any", error.error_code)
            status = f"HTTP status {error.http_status_code}"
            if code in MISSING_CODES:
                fault = f"has no such subject, version or schema ({status}, code {code})"
                raise SchemaMissing(f"{place}: the schema registry {fault}") from None
            is_registry = type(code) is int and str(code).startswith(str(error.http_status_code))
            status += f", code {code}" if is_registry else f": {NOT_A_REGISTRY}"
            raise self._unavailable(status) from None
        except HTTPError as error:
            raise self._unavailable(_reason(error)) from None
        except (SchemaMissing, SchemasUnavailable):
            raise
        except Exception as error:
            raise SchemaMissing(f"{place}: has an unusable schema ({type(error).__name__})") from None

    def _client(self, seconds: float) -> SchemaRegistryClient:
        """Return a new client, which reads its files again. Raise ``SchemasUnavailable`` if one cannot be used."""
        settings = self._settings
        conf: dict[str, object] = {
            "url": settings.url,
            "timeout": max(0.1, min(TIMEOUT_SECONDS, seconds)),
            "max.retries": 0,
            # By itself the client takes the authorities of certifi, which know no private ones.
            "ssl.ca.location": str(
                settings.ca_file or system_authorities() or ssl.get_default_verify_paths().capath or ""
            )
            or None,
        }
        if settings.client_certificate is not None:
            conf["ssl.certificate.location"] = str(settings.client_certificate)
            conf["ssl.key.location"] = str(settings.client_key or settings.client_certificate)
            # Without one, OpenSSL asks the terminal for the password of an encrypted key.
            conf["ssl.key.password"] = ""
        try:
            if settings.user_info is not None:
                conf["basic.auth.user.info"] = settings.user_info.read(str)
        except ValueError as reason:
            raise SchemasUnavailable(f"registry.user_info: {reason}") from None
        try:
            client = SchemaRegistryClient(conf)
        except (OSError, ValueError) as error:
            try:
                Tls(settings.ca_file, settings.client_certificate, settings.client_key).context()
            except ValueError as reason:
                raise SchemasUnavailable(f"registry.{reason}") from None
            raise self._unavailable(type(error).__name__) from None
        # Python 3.13 began to refuse private authorities without key identifiers.
        verify_alike(cast("Any", client)._rest_client.verify)
        return client

    def _unavailable(self, reason: str) -> SchemasUnavailable:
        return SchemasUnavailable(f"schema registry {', '.join(map(_shown, self._settings.url.split(',')))}: {reason}")


def _shown(url: str) -> str:
    """Return an address without its path."""
    parts = urlsplit(url.strip())
    return f"{parts.scheme}://{parts.netloc}"


def _reason(error: BaseException) -> str:
    """Return a reason without anything of the answer, which messages of HTTP's errors quote."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    match cause:
        case TimeoutError():
            return "no answer in time"
        case ssl.SSLCertVerificationError(verify_message=message):
            return f"its certificate is not accepted: {message}"
        case OSError(strerror=str(reason)):
            return f"no answer: {reason}"
        case _:
            return f"no answer ({type(error).__name__})"
