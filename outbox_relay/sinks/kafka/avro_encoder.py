"""The encoder of JSON to Avro."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import SerializationContext
from fastavro.schema import parse_schema
from fastavro.validation import ValidationError, validate

from outbox_relay.sinks.kafka.encoder_base import (
    MAX_SHOWN,
    EncoderPlan,
    Misfit,
    SchemaEncoder,
    Serialize,
    listed,
    path_of,
)


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


def avro_encoder(plan: EncoderPlan, _record: str | None) -> SchemaEncoder:
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
