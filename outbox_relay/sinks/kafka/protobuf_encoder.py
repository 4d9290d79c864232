"""The encoder of JSON to Protobuf."""

from __future__ import annotations

import base64
import re
from importlib import import_module
from typing import Any, cast

from confluent_kafka.schema_registry import RegisteredSchema
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import SerializationContext
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError, EncodeError
from google.protobuf.message_factory import GetMessageClass

from outbox_relay.sinks.kafka.encoder_base import EncoderPlan, Misfit, SchemaEncoder, Serialize, listed, path_of
from outbox_relay.sinks.kafka.event_schemas import SchemaUnusable
from outbox_relay.sinks.kafka.json_depth import MAX_DEPTH

_FAILED = re.compile(r"Failed to parse (\w+) field: ")


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


def protobuf_encoder(plan: EncoderPlan, record: str | None) -> SchemaEncoder:
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
