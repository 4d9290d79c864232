"""Encoders of JSON to Avro, JSON Schema and Protobuf in Confluent's wire format. Needs the extra ``registry``.

The reasons of refusals name fields and expected types, and no value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, cast

from confluent_kafka.schema_registry import RegisteredSchema, SchemaRegistryClient

from outbox_relay.sinks.kafka.encoder_base import EncoderPlan, FoundSchema, SchemaEncoder

Format: TypeAlias = Literal["avro", "json", "protobuf"]


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


MakeEncoder: TypeAlias = Callable[[EncoderPlan, str | None], SchemaEncoder]


def encoders_of(form: Format) -> MakeEncoder:
    """Return the function that makes encoders of a format. Raise ImportError without the packages of that format."""
    match form:
        case "avro":
            from outbox_relay.sinks.kafka.avro_encoder import avro_encoder

            return avro_encoder
        case "json":
            from outbox_relay.sinks.kafka.json_encoder import json_encoder

            return json_encoder
        case "protobuf":
            from outbox_relay.sinks.kafka.protobuf_encoder import protobuf_encoder

            return protobuf_encoder


def make_encoder(make: MakeEncoder, subject: str, record: str | None, found: FoundSchema) -> SchemaEncoder:
    """Return the encoder for events of ``subject``. Raise any exception if the schema cannot be used."""

    def name(_context: object, _record: object) -> str:
        return subject

    settings: dict[str, object] = {
        "auto.register.schemas": False,
        "use.latest.version": True,
        "subject.name.strategy": name,
    }
    place = f"subject {subject}, version {found.root.version}" if found.root.version else f"subject {subject}"
    return make(EncoderPlan(found, place, cast("SchemaRegistryClient", _Pinned(found)), settings), record)
