"""Payloads in the wire format of a schema registry: confluent's deserializers read them, and misfits say where."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaReference
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass

from outbox_relay.sinks.kafka import encoders
from outbox_relay.sinks.kafka.delivery import Encoder
from outbox_relay.sinks.kafka.encoders import MAX_DEPTH, Format, FoundSchema, is_too_deep, make_encoder
from outbox_relay.sinks.kafka.schemas import SchemaUnusable
from tests.support.apicurio import AVRO, JSON_SCHEMA, protobuf

SECRET = "a-secret-of-the-event"
PREFIX = b"\x00\x00\x00\x00\x07"
"""Confluent's: a zero, and the id of the schema in four bytes."""
MESSAGE = b"\x02\x02"
"""Behind the prefix with Protobuf: the place of the message in its file, a list of one number, 1."""
TYPES: Mapping[Format, str] = {"avro": "AVRO", "json": "JSON", "protobuf": "PROTOBUF"}


def registered(text: str, form: Format, references: list[SchemaReference] | None = None) -> RegisteredSchema:
    return RegisteredSchema("orders-value", 1, 7, None, Schema(text, TYPES[form], references or []))


def text_of(form: Format) -> str:
    if form == "protobuf":
        return base64.b64encode(protobuf().SerializeToString()).decode()
    return json.dumps(AVRO if form == "avro" else JSON_SCHEMA)


def encoder(form: Format, text: str | None = None) -> Encoder:
    found = FoundSchema(registered(text or text_of(form), form), {})
    return make_encoder(form, "orders-value", "shop.Order" if form == "protobuf" else None, found)


class OneSchema:
    """The registry as a consumer's deserializer sees it: it has one schema."""

    def __init__(self, form: Format) -> None:
        self._schema = registered(text_of(form), form).schema

    def get_schema(self, *_: object, **__: object) -> Schema:
        return self._schema

    def config(self) -> dict[str, str]:
        return {}


def message_class() -> Any:
    pool: Any = DescriptorPool()
    pool.Add(protobuf())
    return cast("Any", GetMessageClass)(pool.FindMessageTypeByName("shop.Order"))


def deserializer(form: Format) -> Callable[[bytes], Any]:
    registry: Any = OneSchema(form)
    rules = {"subject.name.strategy.type": "TOPIC"}
    reader: Any
    match form:
        case "avro":
            reader = cast("Any", AvroDeserializer)(registry, conf=rules)
        case "json":
            reader = cast("Any", JSONDeserializer)(None, schema_registry_client=registry, conf=rules)
        case "protobuf":
            reader = cast("Any", ProtobufDeserializer)(message_class(), rules, registry)
    context = SerializationContext("orders", MessageField.VALUE)
    return lambda value: MessageToDict(reader(value, context)) if form == "protobuf" else dict(reader(value, context))


@pytest.mark.parametrize("form", ["avro", "json", "protobuf"])
def test_confluents_deserializer_reads_what_is_encoded(form: Format) -> None:
    value = encoder(form).encode("orders", b'{"n": 3, "note": "x"}')
    assert value.startswith(PREFIX + (MESSAGE if form == "protobuf" else b""))
    assert deserializer(form)(value) == {"n": 3, "note": "x"}


def test_json_is_the_payload_byte_for_byte() -> None:
    payload = b'{ "note" : "\xc3\xa9\\u00e9",  "n":1e0 }'
    assert encoder("json").encode("orders", payload) == PREFIX + payload


def test_content_type_says_the_format() -> None:
    found = [encoder(form).content_type for form in ("avro", "json", "protobuf")]
    assert found == ["application/avro", "application/json", "application/protobuf"]


MISFITS = [
    ("avro", f'{{"n": "{SECRET}"}}', "field shop.Order.n should be int"),
    ("avro", '{"n": 1.5}', "field shop.Order.n should be int"),
    ("avro", '{"n": true}', "field shop.Order.n should be int"),
    ("avro", '{"n": 2147483648}', "field shop.Order.n should be int"),
    ("avro", '{"note": "x"}', "the payload should be a record of n, note"),
    ("avro", f'{{"n": 1, "{SECRET}": 1}}', "a record has a field that the schema does not have, or lacks one"),
    ("avro", f'{{"n": 1, "note": ["{SECRET}"]}}', "field shop.Order.note should be null; field shop.Order.note"),
    ("json", f'{{"n": "{SECRET}"}}', "field n should be integer"),
    ("json", f'{{"n": 1, "{SECRET}": 1}}', "the payload has a field that the schema does not have"),
    ("json", "{}", "the payload lacks n"),
    ("protobuf", f'{{"n": "{SECRET}"}}', "field n should be int32"),
    ("protobuf", '{"n": 2147483648}', "field n should be int32"),
    ("protobuf", f'{{"n": 1, "{SECRET}": 1}}', "the payload has a field that the schema does not have"),
    ("protobuf", f'["{SECRET}"]', "the payload should be an object"),
    *((form, text, "the payload is not JSON in UTF-8") for form in TYPES for text in (SECRET, "", "NaN", "[")),
    *((form, "[" * 9999, "the payload has more than 100 arrays and objects in each other") for form in TYPES),
    ("avro", '{"n": 1, "note": "\\ud800"}', "a text has half of a surrogate pair"),
    *((form, '{"n": 1e400}', "the payload has a number beyond those of 64 bits") for form in ("avro", "protobuf")),
    *((form, "null", "the payload should be") for form in TYPES),
]


@pytest.mark.parametrize(("form", "payload", "reason"), MISFITS, ids=range(len(MISFITS)))
def test_what_does_not_fit_is_refused_with_the_place_and_without_a_value(
    form: Format, payload: str, reason: str
) -> None:
    with pytest.raises(ValueError, match="does not fit the schema") as raised:
        encoder(form).encode("orders", payload.encode())
    text = str(raised.value)
    assert text.startswith(f"does not fit the schema of subject orders-value, version 1: {reason}")
    assert SECRET not in text
    assert type(raised.value) is ValueError


@pytest.mark.parametrize("form", ["avro", "json", "protobuf"])
def test_payload_in_another_encoding_is_refused(form: Format) -> None:
    with pytest.raises(ValueError, match="not JSON in UTF-8"):
        encoder(form).encode("orders", '{"n": 1}'.encode("utf-16"))


def test_event_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "MAX_SECONDS", -1.0)
    with pytest.raises(ValueError, match=r"takes longer than .* to encode in the schema of subject orders-value"):
        encoder("json").encode("orders", b'{"n": 1}')


@pytest.mark.parametrize("key", ["jo@example.com", "jo"])
def test_key_of_a_map_is_not_shown(key: str) -> None:
    table = {"type": "object", "additionalProperties": {"type": "integer"}}
    text = json.dumps({"type": "object", "properties": {"ages": table}})
    with pytest.raises(ValueError, match=r"field ages\.… should be integer") as raised:
        encoder("json", text).encode("orders", json.dumps({"ages": {key: "x"}}).encode())
    assert "jo" not in str(raised.value)


@pytest.mark.parametrize("form", ["avro", "json", "protobuf"])
def test_payload_that_is_nested_deeply_ends_no_process(form: Format) -> None:
    """The schema refers to itself, and what encodes it recurses in C: without the limit the process may crash."""
    schema: object = {
        "avro": {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"], "default": None}]},
        "json": {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    }.get(form)
    text = json.dumps(schema) if schema else nested_file()
    made = make_encoder(form, "nested", None, FoundSchema(registered(text, form), {}))
    assert made.encode("nested", b'{"next":' * 20 + b"{}" + b"}" * 20)
    for depth in (100, 500_000):
        with pytest.raises(ValueError, match="more than 100 arrays and objects"):
            made.encode("nested", b'{"next":' * depth + b"{}" + b"}" * depth)


def nested_file() -> str:
    file = FileDescriptorProto(name="n.proto", syntax="proto3")
    file.message_type.add(name="N").field.add(name="next", number=1, type=11, label=1, type_name=".N")
    return base64.b64encode(file.SerializeToString()).decode()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"properties": {"n": {"$ref": "http://127.0.0.1:1/n.json"}}},
            r"has a \$ref to http://127.0.0.1:1/n.json, which",
        ),
        (
            {"$id": "https://shop.example/a.json", "items": {"$ref": "#/definitions/none"}},
            "has a \\$ref to #/definitions/none",
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "allOf": [{"pattern": "\\p{L}"}]},
            "is not a JSON Schema: ",
        ),
    ],
)
def test_schema_that_cannot_be_resolved_is_blamed_and_makes_no_request(
    schema: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket", None)
    with pytest.raises(SchemaUnusable, match=f"subject orders-value, version 1: {reason}"):
        encoder("json", json.dumps(schema))


@pytest.mark.parametrize(
    ("root_id", "item_id", "draft"),
    [
        (None, None, None),
        ("https://shop.example/schemas/cart.json", "item.json", "http://json-schema.org/draft-07/schema#"),
        ("/schemas/cart.json", "https://shop.example/schemas/parts/item.json", None),
        ("urn:shop:cart", None, "http://json-schema.org/draft-07/schema#"),
    ],
)
def test_references_of_json_are_relative_to_the_id(root_id: str | None, item_id: str | None, draft: str | None) -> None:
    """As with Confluent's serializer for Java: to that of the schema that refers to them, if it has one."""

    def schema(identifier: str | None, contents: Mapping[str, object]) -> str:
        keywords = {"$id": identifier, "$schema": draft}
        return json.dumps({**{name: each for name, each in keywords.items() if each is not None}, **contents})

    cart = schema(root_id, {"properties": {"items": {"items": {"$ref": "item.json"}}}})
    item = schema(item_id, {"properties": {"n": {"$ref": "number.json#/definitions/n"}}})
    number = schema(None, {"definitions": {"n": {"type": "integer"}}})
    root = registered(cart, "json", [SchemaReference("item.json", "item", 1)])
    references = {
        ("item", 1): registered(item, "json", [SchemaReference("number.json", "number", 2)]),
        ("number", 2): registered(number, "json"),
    }
    made = make_encoder("json", "cart", None, FoundSchema(root, references))
    assert made.encode("cart", b'{"items": [{"n": 1}]}') == PREFIX + b'{"items": [{"n": 1}]}'
    with pytest.raises(ValueError, match=r"field items\[0\]\.n should be integer"):
        made.encode("cart", b'{"items": [{"n": "x"}]}')


def test_references_are_resolved() -> None:
    item = registered('{"type": "record", "name": "shop.Item", "fields": [{"name": "n", "type": "int"}]}', "avro")
    text = '{"type": "record", "name": "shop.Cart", "fields": [{"name": "a", "type": "shop.Item"}]}'
    root = registered(text, "avro", [SchemaReference("shop.Item", "item", 3)])
    made = make_encoder("avro", "cart", None, FoundSchema(root, {("item", 3): item}))
    assert made.encode("cart", b'{"a": {"n": 2}}') == PREFIX + b"\x04"
    item = registered('{"type": "integer"}', "json")
    root = registered('{"properties": {"n": {"$ref": "n.json"}}}', "json", [SchemaReference("n.json", "n", 3)])
    made = make_encoder("json", "cart", None, FoundSchema(root, {("n", 3): item}))
    with pytest.raises(ValueError, match="field n should be integer"):
        made.encode("cart", b'{"n": "x"}')


def test_message_is_named_or_the_first_of_its_file() -> None:
    text = text_of("protobuf")
    first = make_encoder("protobuf", "orders-value", None, FoundSchema(registered(text, "protobuf"), {}))
    assert first.encode("orders", b'{"x": "y"}') == PREFIX + b"\x00" + b"\n\x01y"
    with pytest.raises(SchemaUnusable, match=r"has no message shop\.Missing"):
        make_encoder("protobuf", "orders-value", "shop.Missing", FoundSchema(registered(text, "protobuf"), {}))


def test_file_that_is_not_in_serialized_form_is_named() -> None:
    for text in ('syntax = "proto3"; message A {}', "AAAA"):
        with pytest.raises(SchemaUnusable, match=r"subject orders-value: .* not in serialized form"):
            make_encoder("protobuf", "orders-value", None, FoundSchema(registered(text, "protobuf"), {}))


def test_googles_types_are_known() -> None:
    file = FileDescriptorProto(name="a.proto", syntax="proto3", dependency=["google/protobuf/timestamp.proto"])
    field = file.message_type.add(name="A").field.add(name="at", number=1, type=11, label=1)
    field.type_name = ".google.protobuf.Timestamp"
    text = base64.b64encode(file.SerializeToString()).decode()
    made = encoder_of(text)
    assert made.encode("t", b'{"at": "1970-01-01T00:00:01Z"}') == PREFIX + b"\x00\n\x02\x08\x01"
    with pytest.raises(ValueError, match=r"field at should be google.protobuf.Timestamp"):
        made.encode("t", f'{{"at": "{SECRET}"}}'.encode())


def encoder_of(text: str) -> Encoder:
    return make_encoder("protobuf", "t-value", None, FoundSchema(registered(text, "protobuf"), {}))


@pytest.mark.parametrize("begin", ["[", '{"a":'])
def test_depth_is_that_of_arrays_and_objects_in_each_other(begin: str) -> None:
    assert not is_too_deep(begin * MAX_DEPTH)
    assert is_too_deep(begin * (MAX_DEPTH + 1))


@pytest.mark.parametrize("text", ["[]," * 1000, r'"\"' + "[" * 1000 + '"', '"' + "{" * 1000])
def test_neighbours_and_texts_do_not_count(text: str) -> None:
    assert not is_too_deep(f"[{text}")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", ['"', '\\"', "[]"])
def test_time_to_judge_the_depth_is_linear(piece: str) -> None:
    """Goes red if a text without an end is searched from each of its quotes: that takes minutes."""
    is_too_deep("[" + "[]" * 200 + piece * 500_000)
