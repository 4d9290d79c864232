"""Encoders of JSON to Avro, JSON Schema and Protobuf in Confluent's wire format. Needs the extra ``registry``.

The reasons of refusals name fields and expected types, and no value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, cast

from confluent_kafka.schema_registry import RegisteredSchema, SchemaRegistryClient
from confluent_kafka.serialization import MessageField, SerializationContext

from outbox_relay.sinks.kafka.call import Encoder
from outbox_relay.sinks.kafka.event_schemas import SchemaUnusable

Format: TypeAlias = Literal["avro", "json", "protobuf"]
References: TypeAlias = dict[tuple[str, int], RegisteredSchema]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""A name that may be shown. Keys of maps come from the payload, and others of them are hidden."""
_MAX_SHOWN = 5
_MAX_DEPTH = 100

Serialize: TypeAlias = Callable[[Any, SerializationContext], bytes | None]


class FoundSchema(NamedTuple):
    """A registered schema, and by subject and version those that it refers to, each after its own references."""

    root: RegisteredSchema
    references: References


class Misfit(ValueError):
    """The payload does not fit the schema. The message says where, without any value."""


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


def make_encoder(form: Format, subject: str, record: str | None, found: FoundSchema) -> Encoder:
    """Return the encoder for events of ``subject``. Raise ``SchemaUnusable`` if the schema cannot be used."""
    registry = cast("SchemaRegistryClient", _Pinned(found))

    def name(_context: object, _record: object) -> str:
        return subject

    settings: dict[str, object] = {
        "auto.register.schemas": False,
        "use.latest.version": True,
        "subject.name.strategy": name,
    }
    place = f"subject {subject}, version {found.root.version}" if found.root.version else f"subject {subject}"
    match form:
        case "avro":
            return _avro(place, found, registry, settings)
        case "json":
            return _json(place, found, registry, settings)
        case "protobuf":
            return _protobuf(place, record, found, registry, settings)


class _Encoder:
    def __init__(self, content_type: str, place: str) -> None:
        self._content_type = content_type
        self._place = place

    @property
    def content_type(self) -> str:
        return self._content_type

    def encode(self, topic: str, payload: bytes) -> bytes:
        try:
            value = _loaded(payload)
            encoded = self._encoded(value, payload, SerializationContext(topic, MessageField.VALUE))
        except Misfit as reason:
            raise ValueError(f"does not fit the schema of {self._place}: {reason}") from None
        except Exception as error:
            # Messages of libraries quote values.
            text = f"does not fit the schema of {self._place} ({type(error).__name__})"
            raise ValueError(text) from None
        if encoded is None:
            raise ValueError(f"does not fit the schema of {self._place}: it has no value for null")
        return encoded

    def _encoded(self, value: Any, payload: bytes, context: SerializationContext) -> bytes | None:
        raise NotImplementedError


def _loaded(payload: bytes) -> Any:
    try:
        return json.loads(payload.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Misfit("the payload is not JSON in UTF-8") from None


def _refuse_constant(_name: str) -> NoReturn:
    raise ValueError


def _path(parts: Iterable[str | int]) -> str:
    """Return a path of names and positions, such as ``items[2].price``."""
    found = ""
    for part in parts:
        if isinstance(part, int):
            found += f"[{part}]"
        else:
            found += ("." if found else "") + (part if _NAME.fullmatch(part) else "…")
    return found


def _listed(names: Iterable[str]) -> str:
    shown = [name if _NAME.fullmatch(name) else "…" for name in names]
    return ", ".join(shown[:_MAX_SHOWN]) + (", …" if len(shown) > _MAX_SHOWN else "")


# -- Avro --------------------------------------------------------------------------------------------------------


class _Avro(_Encoder):
    def __init__(self, place: str, schema: Any, serialize: Serialize) -> None:
        super().__init__("application/avro", place)
        self._schema = schema
        self._serialize = serialize

    def _encoded(self, value: Any, payload: bytes, context: SerializationContext) -> bytes | None:
        from fastavro.validation import ValidationError, validate

        del payload
        try:
            # The writer takes what it can turn into a type, such as a text for true: only this looks closely.
            validate(value, self._schema, strict=True)
        except ValidationError as error:
            raise Misfit(_avro_misfit(error)) from None
        try:
            return self._serialize(value, context)
        except ValueError:
            raise Misfit("a record has a field that the schema does not have, or lacks one") from None


def _avro(place: str, found: FoundSchema, registry: SchemaRegistryClient, settings: dict[str, object]) -> Encoder:
    from confluent_kafka.schema_registry.avro import AvroSerializer
    from fastavro.schema import parse_schema

    named: dict[str, Any] = {}
    parsed: Any = None
    for schema in [*_in_order(found), found.root]:
        parsed = parse_schema(json.loads(schema.schema.schema_str or ""), named_schemas=named)
    settings |= {"validate.strict.allow.default": True}
    return _Avro(place, parsed, cast("Any", AvroSerializer)(registry, conf=settings))


def _in_order(found: FoundSchema) -> list[RegisteredSchema]:
    """Return the schemas that the root refers to, each after those that it refers to itself."""
    ordered: dict[tuple[str, int], RegisteredSchema] = {}

    def visit(schema: RegisteredSchema) -> None:
        for reference in schema.schema.references or ():
            place = (str(reference.subject), int(reference.version or 0))
            if place not in ordered:
                visit(found.references[place])
                ordered[place] = found.references[place]

    visit(found.root)
    return list(ordered.values())


def _avro_misfit(error: Any) -> str:
    shown: dict[str, None] = {}
    for each in error.errors:
        expected = f"should be {_avro_type(each.schema)}"
        parts = [part for part in str(each.field or "").split(".") if part]
        shown[f"field {_path(parts)} {expected}" if parts else f"the payload {expected}"] = None
    return "; ".join(list(shown)[:_MAX_SHOWN]) or "its fields differ"


def _avro_type(schema: Any) -> str:
    if isinstance(schema, list):
        return " or ".join(map(_avro_type, cast("list[Any]", schema)[:_MAX_SHOWN]))
    if isinstance(schema, Mapping):
        table = cast("Mapping[str, Any]", schema)
        kind = table.get("type")
        names = cast("list[Any]", table.get("fields", ()))
        if kind in ("record", "error"):
            return f"a record of {_listed(str(each['name']) for each in names)}"
        return _avro_type(kind) if "name" not in table else f"{kind} {_path(str(table['name']).split('.'))}"
    return _path(str(schema).split("."))


# -- JSON Schema -------------------------------------------------------------------------------------------------


class _Json(_Encoder):
    def __init__(self, place: str, validator: Any) -> None:
        super().__init__("application/json", place)
        self._validator = validator
        self._payload = b""
        self.serialize: Serialize | None = None

    def payload(self, _value: object) -> bytes:
        """Return the payload that is being encoded, byte for byte: JSON that is written again may differ."""
        return self._payload

    def _encoded(self, value: Any, payload: bytes, context: SerializationContext) -> bytes | None:
        from jsonschema import exceptions

        error: Any = cast("Any", exceptions).best_match(self._validator.iter_errors(value))
        if error is not None:
            raise Misfit(_json_misfit(error))
        if self.serialize is None:
            raise SchemaUnusable("has no serializer")
        self._payload = payload
        try:
            # The serializer writes nothing for None, and the value matters to validation alone.
            return self.serialize(True if value is None else value, context)
        finally:
            self._payload = b""


def _json(place: str, found: FoundSchema, registry: SchemaRegistryClient, settings: dict[str, object]) -> Encoder:
    from confluent_kafka.schema_registry.json_schema import JSONSerializer
    from jsonschema.validators import validator_for
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT7

    # This registry fetches nothing: a serializer that validates would ask any address that a schema names.
    known: Any = cast("Any", Registry)()
    for schema in (found.root, *found.references.values()):
        for reference in schema.schema.references or ():
            referenced = found.references[str(reference.subject), int(reference.version or 0)]
            contents = json.loads(referenced.schema.schema_str or "")
            resource: Any = Resource.from_contents(contents, default_specification=DRAFT7)
            known = known.with_resource(str(reference.name), resource)
    contents = json.loads(found.root.schema.schema_str or "")
    kind: Any = validator_for(contents)
    kind.check_schema(contents)
    encoder = _Json(place, kind(contents, registry=known))
    settings |= {"validate": False}
    serializer: Any = cast("Any", JSONSerializer)(
        found.root.schema, registry, conf=settings, json_encode=encoder.payload
    )
    encoder.serialize = serializer
    return encoder


def _json_misfit(error: Any) -> str:
    """Return a reason from the keyword that the value breaks, and the place of the value."""
    path = _path(error.absolute_path)
    subject = f"field {path}" if path else "the payload"
    keyword, wanted = error.validator, error.validator_value
    match keyword:
        case "type":
            return f"{subject} should be {_listed([wanted] if isinstance(wanted, str) else wanted)}"
        case "required":
            return f"{subject} lacks {_listed(name for name in wanted if name not in error.instance)}"
        case "additionalProperties" | "unevaluatedProperties":
            return f"{subject} has a field that the schema does not have"
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "minLength" | "maxLength" | "format":
            return f"{subject} breaks {keyword} {str(wanted)[:40]}"
        case _:
            return f"{subject} breaks {str(keyword)[:40]}"


# -- Protobuf ----------------------------------------------------------------------------------------------------

_FAILED = re.compile(r"Failed to parse (\w+) field: ")


class _Protobuf(_Encoder):
    def __init__(self, place: str, message: Any, pool: Any, serialize: Serialize) -> None:
        super().__init__("application/protobuf", place)
        self._message = message
        self._pool = pool
        self._serialize = serialize

    def _encoded(self, value: Any, payload: bytes, context: SerializationContext) -> bytes | None:
        from google.protobuf.json_format import ParseDict, ParseError
        from google.protobuf.message import EncodeError

        del payload
        message = self._message()
        if not isinstance(value, dict):
            raise Misfit("the payload should be an object")
        try:
            ParseDict(
                cast("dict[str, Any]", value), message, descriptor_pool=self._pool, max_recursion_depth=_MAX_DEPTH
            )
        except ParseError as error:
            raise Misfit(_protobuf_misfit(self._message.DESCRIPTOR, str(error))) from None
        try:
            return self._serialize(message, context)
        except EncodeError:
            raise Misfit(f"lacks {_listed(message.FindInitializationErrors())}") from None


def _protobuf(
    place: str, record: str | None, found: FoundSchema, registry: SchemaRegistryClient, settings: dict[str, object]
) -> Encoder:
    from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool: Any = DescriptorPool()
    names: set[str] = set()
    for schema in (*_in_order(found), found.root):
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
    serializer: Any = cast("Any", ProtobufSerializer)(message, registry, conf=settings)
    return _Protobuf(place, message, pool, serializer)


def _add_file(pool: Any, names: set[str], name: str, schema: RegisteredSchema) -> list[str]:
    """Add a file to the pool, with those of Google that it imports. Return the names of its messages, in order."""
    import base64

    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    if name in names:
        return []
    names.add(name)
    file: Any = FileDescriptorProto.FromString(base64.b64decode(schema.schema.schema_str or ""))
    file.name = name
    for imported in file.dependency:
        _add_known(pool, names, imported)
    pool.Add(file)
    return [str(each.name) for each in file.message_type]


def _add_known(pool: Any, names: set[str], name: str) -> None:
    from importlib import import_module

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
    subject = f"field {_path(names)}" if names else "the payload"
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
