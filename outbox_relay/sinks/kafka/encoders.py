"""Encoders of JSON to Avro, JSON Schema and Protobuf in Confluent's wire format. Needs the extra ``registry``.

The reasons of refusals name fields and expected types, and no value.
"""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, cast
from urllib.parse import urljoin

from confluent_kafka.schema_registry import RegisteredSchema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from fastavro.schema import parse_schema
from fastavro.validation import ValidationError, validate
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError, EncodeError
from google.protobuf.message_factory import GetMessageClass
from jsonschema import exceptions
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY  # pyright: ignore[reportMissingTypeStubs]
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT7, DRAFT202012

from outbox_relay.sinks.kafka.schemas import SchemaUnusable

Format: TypeAlias = Literal["avro", "json", "protobuf"]
References: TypeAlias = dict[tuple[str, int], RegisteredSchema]
Serialize: TypeAlias = Callable[[Any, SerializationContext], bytes | None]

MAX_DEPTH = 100
"""Maximum number of arrays and objects in each other. What encodes them recurses, some of it in C without a limit."""
MAX_SECONDS = 3.0
"""Longest time of the processor for one event. One that takes longer would hold up its sink at each attempt."""
MAX_SHOWN = 5
"""Maximum number of names, or of faults, in a reason."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""A name that may be shown. Keys of maps come from the payload, and others of them are hidden."""
_NOT_JSON = "the payload is not JSON in UTF-8"
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
"""A string, also one without an end: the rest of it is not searched again from each of its quotes."""
_FAILED = re.compile(r"Failed to parse (\w+) field: ")


def is_too_deep(text: str) -> bool:
    """Return True if ``text`` has more than ``MAX_DEPTH`` arrays and objects in each other."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        match text[found.start()]:
            case "[" | "{":
                depth += 1
                if depth > MAX_DEPTH:
                    return True
            case "]" | "}":
                depth -= 1
            case _:
                pass
    return False


class FoundSchema(NamedTuple):
    """A registered schema, and by subject and version those that it refers to, directly or not."""

    root: RegisteredSchema
    references: References

    def in_order(self) -> list[RegisteredSchema]:
        """Return the schemas that the root refers to, each after those that it refers to itself."""
        ordered: dict[tuple[str, int], RegisteredSchema] = {}

        def visit(schema: RegisteredSchema) -> None:
            for reference in schema.schema.references or ():
                place = (str(reference.subject), int(reference.version or 0))
                if place not in ordered:
                    visit(self.references[place])
                    ordered[place] = self.references[place]

        visit(self.root)
        return list(ordered.values())


class Misfit(ValueError):
    """The payload does not fit the schema. The message says where, without any value."""


class EncoderPlan(NamedTuple):
    """The schema of an encoder, its subject for reasons, and the registry and settings of confluent's serializer."""

    found: FoundSchema
    place: str
    registry: SchemaRegistryClient
    settings: dict[str, object]


class SchemaEncoder:
    """Encodes payloads of one schema. A subclass has the format."""

    content_type = ""
    finite = True
    """Numbers that Python rounds to infinity are refused."""

    def __init__(self, plan: EncoderPlan) -> None:
        self._place = plan.place

    def encode(self, topic: str, payload: bytes) -> bytes:
        """Return the value for ``payload``. Raise ValueError, without any value of it, if it does not fit."""
        begin = time.thread_time()
        try:
            value = _loaded(payload, _finite if self.finite else float)
            encoded = self._encoded(value, payload, SerializationContext(topic, MessageField.VALUE))
        except Misfit as reason:
            raise ValueError(f"does not fit the schema of {self._place}: {reason}") from None
        except Exception as error:
            # Messages of libraries quote values.
            text = f"does not fit the schema of {self._place} ({type(error).__name__})"
            raise ValueError(text) from None
        if time.thread_time() - begin > MAX_SECONDS:
            raise ValueError(f"takes longer than {MAX_SECONDS:g} s to encode in the schema of {self._place}")
        if encoded is None:
            raise ValueError(f"does not fit the schema of {self._place}: it has no value for null")
        return encoded

    def _encoded(self, value: Any, payload: bytes, context: SerializationContext) -> bytes | None:
        raise NotImplementedError


def _loaded(payload: bytes, to_float: Callable[[str], float]) -> Any:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise Misfit(_NOT_JSON) from None
    if is_too_deep(text):
        raise Misfit(f"the payload has more than {MAX_DEPTH} arrays and objects in each other")
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=to_float)
    except Misfit:
        raise
    except (ValueError, RecursionError):
        raise Misfit(_NOT_JSON) from None


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise Misfit("the payload has a number beyond those of 64 bits")
    return number


def _refuse_constant(_name: str) -> NoReturn:
    raise ValueError


def path_of(parts: Iterable[str | int]) -> str:
    """Return a path of names and positions, such as ``items[2].price``."""
    found = ""
    for part in parts:
        if isinstance(part, int):
            found += f"[{part}]"
        else:
            found += ("." if found else "") + (part if _NAME.fullmatch(part) else "…")
    return found


def listed(names: Iterable[str]) -> str:
    """Return the first few names."""
    shown = [name if _NAME.fullmatch(name) else "…" for name in names]
    return ", ".join(shown[:MAX_SHOWN]) + (", …" if len(shown) > MAX_SHOWN else "")


class _Pinned:
    """The registry as the serializers see it: it knows one schema and its references, and makes no request."""

    def __init__(self, found: FoundSchema) -> None:
        self._found = found

    def config(self) -> dict[str, str]:
        """Return the settings for rules, of which there are none."""
        return {}

    def get_latest_version(self, subject_name: str, fmt: str | None = None) -> RegisteredSchema:
        """Return the schema."""
        del subject_name, fmt
        return self._found.root

    def get_version(
        self, subject_name: str, version: int, deleted: bool = False, fmt: str | None = None
    ) -> RegisteredSchema:
        """Return a schema that the schema refers to."""
        del deleted, fmt
        return self._found.references[subject_name, version]


def make_encoder(form: Format, subject: str, record: str | None, found: FoundSchema) -> SchemaEncoder:
    """Return the encoder for events of ``subject``. Raise any exception if the schema cannot be used."""

    def name(_context: object, _record: object) -> str:
        return subject

    settings: dict[str, object] = {
        "auto.register.schemas": False,
        "use.latest.version": True,
        "subject.name.strategy": name,
    }
    place = f"subject {subject}, version {found.root.version}" if found.root.version else f"subject {subject}"
    plan = EncoderPlan(found, place, cast("SchemaRegistryClient", _Pinned(found)), settings)
    match form:
        case "avro":
            return _avro_encoder(plan)
        case "json":
            return _json_encoder(plan)
        case "protobuf":
            return _protobuf_encoder(plan, record)


class _Avro(SchemaEncoder):
    content_type = "application/avro"

    def __init__(self, plan: EncoderPlan, schema: Any, serialize: Serialize) -> None:
        super().__init__(plan)
        self._schema = schema
        self._serialize = serialize

    def _encoded(self, value: Any, payload: bytes, context: SerializationContext) -> bytes | None:
        del payload
        try:
            # The writer takes what it can turn into a type, such as a text for true: only this looks closely.
            validate(value, self._schema, strict=True)
        except ValidationError as error:
            raise Misfit(_avro_misfit(error)) from None
        try:
            return self._serialize(value, context)
        except UnicodeEncodeError:
            raise Misfit("a text has half of a surrogate pair, which UTF-8 has not") from None
        except ValueError:
            raise Misfit("a record has a field that the schema does not have, or lacks one") from None


def _avro_encoder(plan: EncoderPlan) -> SchemaEncoder:
    """Return the encoder of an Avro schema."""
    named: dict[str, Any] = {}
    parsed: Any = None
    for schema in [*plan.found.in_order(), plan.found.root]:
        parsed = parse_schema(json.loads(schema.schema.schema_str or ""), named_schemas=named)
    settings = {**plan.settings, "validate.strict.allow.default": True}
    return _Avro(plan, parsed, cast("Any", AvroSerializer)(plan.registry, conf=settings))


def _avro_misfit(error: Any) -> str:
    shown: dict[str, None] = {}
    for each in error.errors:
        expected = f"should be {_avro_type(each.schema)}"
        parts = [part for part in str(each.field or "").split(".") if part]
        shown[f"field {path_of(parts)} {expected}" if parts else f"the payload {expected}"] = None
    return "; ".join(list(shown)[:MAX_SHOWN]) or "its fields differ"


def _avro_type(schema: Any) -> str:
    if isinstance(schema, list):
        return " or ".join(map(_avro_type, cast("list[Any]", schema)[:MAX_SHOWN]))
    if isinstance(schema, Mapping):
        table = cast("Mapping[str, Any]", schema)
        kind = table.get("type")
        names = cast("list[Any]", table.get("fields", ()))
        if kind in ("record", "error"):
            return f"a record of {listed(str(each['name']) for each in names)}"
        return _avro_type(kind) if "name" not in table else f"{kind} {path_of(str(table['name']).split('.'))}"
    return path_of(str(schema).split("."))


class _Json(SchemaEncoder):
    content_type = "application/json"
    finite = False

    def __init__(self, plan: EncoderPlan, validator: Any, names: frozenset[str]) -> None:
        super().__init__(plan)
        self._validator = validator
        self._names = names
        self._payload = b""
        self.serialize: Serialize | None = None

    def payload(self, _value: object) -> bytes:
        """Return the payload that is being encoded, byte for byte: JSON that is written again may differ."""
        return self._payload

    def _encoded(self, value: Any, payload: bytes, context: SerializationContext) -> bytes | None:
        error: Any = cast("Any", exceptions).best_match(self._validator.iter_errors(value))
        if error is not None:
            raise Misfit(_json_misfit(error, self._names))
        if self.serialize is None:
            raise SchemaUnusable("has no serializer")
        self._payload = payload
        try:
            # The serializer writes nothing for None, and the value matters to validation alone.
            return self.serialize(True if value is None else value, context)
        finally:
            self._payload = b""


def _json_encoder(plan: EncoderPlan) -> SchemaEncoder:
    """Return the encoder, which is a validator, of a JSON Schema."""
    found = plan.found
    names: set[str] = set()
    contents = json.loads(found.root.schema.schema_str or "")
    _add_names(contents, names)
    kind: Any = validator_for(contents)
    try:
        kind.check_schema(contents)
    except exceptions.SchemaError as error:
        raise SchemaUnusable(f"{plan.place}: is not a JSON Schema: {error.message[:200]}") from None
    root: Any = Resource.from_contents(contents, default_specification=DRAFT202012)
    known = _referenced(found, root.id() or "", names)
    _require_usable(plan.place, root, known.resolver_with_root(root))
    encoder = _Json(plan, kind(contents, registry=known), frozenset(names))
    settings = {**plan.settings, "validate": False}
    serializer: Any = cast("Any", JSONSerializer)(
        found.root.schema, plan.registry, conf=settings, json_encode=encoder.payload
    )
    encoder.serialize = serializer
    return encoder


def _referenced(found: FoundSchema, base: str, names: set[str]) -> Any:
    """Return the schemas that the root refers to, whose address is ``base``, and add their keys to ``names``.

    The result fetches nothing: a serializer that validates would ask any address that a schema names.
    """
    known: Any = REGISTRY
    waiting: list[tuple[RegisteredSchema, frozenset[str]]] = [(found.root, frozenset((base,)))]
    seen: set[str] = set()
    while waiting:
        schema, bases = waiting.pop()
        for reference in schema.schema.references or ():
            referenced = found.references[str(reference.subject), int(reference.version or 0)]
            contents = json.loads(referenced.schema.schema_str or "")
            _add_names(contents, names)
            resource: Any = Resource.from_contents(contents, default_specification=DRAFT7)
            # As with Confluent's serializer for Java, a name is relative to the $id of the schema that refers to it.
            # The validator takes the address by which that schema was found.
            uris = frozenset(urljoin(base, str(reference.name)) for base in (*bases, ""))
            known = known.with_resources((uri, resource) for uri in uris)
            if not uris <= seen:
                seen |= uris
                waiting.append((referenced, uris | {urljoin(uri, resource.id() or "") for uri in uris}))
    return known


def _require_usable(place: str, root: Any, resolver: Any) -> None:
    """Raise ``SchemaUnusable`` if a schema refers to what does not exist. The validator would blame the event."""
    waiting: list[tuple[Any, Any]] = [(root, resolver)]
    seen: set[int] = set()
    while waiting:
        resource, resolver = waiting.pop()
        if id(resource.contents) in seen:
            continue
        seen.add(id(resource.contents))
        table = cast("dict[str, Any]", resource.contents) if isinstance(resource.contents, dict) else {}
        for keyword in ("$ref", "$dynamicRef"):
            if isinstance(target := table.get(keyword), str):
                try:
                    found = resolver.lookup(target)
                except Unresolvable:
                    fault = f"has a {keyword} to {target[:200]}, which is none of its references"
                    raise SchemaUnusable(f"{place}: {fault}") from None
                waiting.append((resource._specification.create_resource(found.contents), found.resolver))
        waiting += [(each, resolver.in_subresource(each)) for each in resource.subresources()]


def _add_names(schema: Any, names: set[str]) -> None:
    """Add the keys of a schema, among them those of objects that it names."""
    if isinstance(schema, dict):
        table = cast("dict[str, Any]", schema)
        names.update(table)
        schema = list(table.values())
    if isinstance(schema, list):
        for each in cast("list[Any]", schema):
            _add_names(each, names)


def _json_misfit(error: Any, names: frozenset[str]) -> str:
    """Return a reason from the keyword that the value breaks, and the place of the value.

    Keys are shown only if they are in ``names``: those of maps are part of the payload.
    """
    path = path_of(part if isinstance(part, int) or part in names else "" for part in error.absolute_path)
    subject = f"field {path}" if path else "the payload"
    keyword, wanted = error.validator, error.validator_value
    match keyword:
        case "type":
            return f"{subject} should be {listed([wanted] if isinstance(wanted, str) else wanted)}"
        case "required":
            return f"{subject} lacks {listed(name for name in wanted if name not in error.instance)}"
        case "additionalProperties" | "unevaluatedProperties":
            return f"{subject} has a field that the schema does not have"
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "minLength" | "maxLength" | "format":
            return f"{subject} breaks {keyword} {str(wanted)[:40]}"
        case _:
            return f"{subject} breaks {str(keyword)[:40]}"


class _Protobuf(SchemaEncoder):
    content_type = "application/protobuf"

    def __init__(self, plan: EncoderPlan, message: Any, pool: Any, serialize: Serialize) -> None:
        super().__init__(plan)
        self._message = message
        self._pool = pool
        self._serialize = serialize

    def _encoded(self, value: Any, payload: bytes, context: SerializationContext) -> bytes | None:
        del payload
        message = self._message()
        if not isinstance(value, dict):
            raise Misfit("the payload should be an object")
        try:
            ParseDict(cast("dict[str, Any]", value), message, descriptor_pool=self._pool, max_recursion_depth=MAX_DEPTH)
        except ParseError as error:
            raise Misfit(_protobuf_misfit(self._message.DESCRIPTOR, str(error))) from None
        try:
            return self._serialize(message, context)
        except EncodeError:
            raise Misfit(f"lacks {listed(message.FindInitializationErrors())}") from None


def _protobuf_encoder(plan: EncoderPlan, record: str | None) -> SchemaEncoder:
    """Return the encoder of the message ``record``, or of the first one of its file."""
    place, found = plan.place, plan.found
    pool: Any = DescriptorPool()
    names: set[str] = set()
    for schema in (*found.in_order(), found.root):
        for reference in schema.schema.references or ():
            referenced = found.references[str(reference.subject), int(reference.version or 0)]
            _add_file(pool, names, str(reference.name), referenced)
    names_in_order = _add_file(pool, names, "default", found.root)
    descriptor: Any = pool.FindFileByName("default")
    in_file = (descriptor.message_types_by_name[each] for each in names_in_order)
    messages: dict[str, Any] = {each.full_name: each for each in in_file}
    if record is not None and record not in messages:
        raise SchemaUnusable(f"{place}: has no message {record} at its top; name it in records")
    if not messages:
        raise SchemaUnusable(f"{place}: has no message")
    message: Any = GetMessageClass(messages[record or next(iter(messages))])
    serializer: Any = cast("Any", ProtobufSerializer)(message, plan.registry, conf=plan.settings)
    return _Protobuf(plan, message, pool, serializer)


def _add_file(pool: Any, names: set[str], name: str, schema: RegisteredSchema) -> list[str]:
    """Add a file to the pool, with those of Google that it imports. Return the names of its messages, in order."""
    if name in names:
        return []
    names.add(name)
    try:
        file: Any = FileDescriptorProto.FromString(base64.b64decode(schema.schema.schema_str or "", validate=True))
    except (ValueError, DecodeError):
        fault = "the registry returned a schema that is not in serialized form (format=serialized)"
        raise SchemaUnusable(f"subject {schema.subject}: {fault}") from None
    file.name = name
    for imported in file.dependency:
        _add_known(pool, names, imported)
    pool.Add(file)
    return [str(each.name) for each in file.message_type]


def _add_known(pool: Any, names: set[str], name: str) -> None:
    if name in names or not name.startswith(("google/protobuf/", "google/type/", "confluent/")):
        return
    names.add(name)
    place = name.removesuffix(".proto").replace("/", ".") + "_pb2"
    module: Any = import_module(f"confluent_kafka.schema_registry.{place}" if place.startswith("confluent") else place)
    for imported in module.DESCRIPTOR.dependencies:
        _add_known(pool, names, imported.name)
    pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)


def _protobuf_misfit(descriptor: Any, text: str) -> str:
    """Return a reason from the fields that the parser's error names. Only names of the schema are shown."""
    names: list[str] = []
    expected, at = None, descriptor
    while (found := _FAILED.match(text)) is not None and at is not None:
        expected = at.fields_by_camelcase_name.get(found[1]) or at.fields_by_name.get(found[1])
        if expected is None:
            break
        names.append(str(expected.name))
        at, text = expected.message_type, text[found.end() :]
    subject = f"field {path_of(names)}" if names else "the payload"
    if text.startswith("Message type ") and "no field named" in text:
        return f"{subject} has a field that the schema does not have"
    if expected is None:
        return f"{subject} does not fit"
    return f"{subject} should be {'a list of ' if expected.is_repeated else ''}{_protobuf_type(expected)}"


def _protobuf_type(expected: Any) -> str:
    if expected.message_type is not None:
        return str(expected.message_type.full_name)
    return str(expected.enum_type.full_name) if expected.enum_type is not None else _SCALARS.get(expected.type, "other")


_SCALARS = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    6: "fixed64",
    7: "fixed32",
    8: "bool",
    9: "string",
    12: "bytes",
    13: "uint32",
    15: "sfixed32",
    16: "sfixed64",
    17: "sint32",
    18: "sint64",
}
"""The names of Protobuf's scalar types by their numbers."""
