"""The encoder of JSON to JSON with a schema."""

from __future__ import annotations

import json
from typing import Any, cast
from urllib.parse import urljoin

from confluent_kafka.schema_registry import RegisteredSchema
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.serialization import SerializationContext
from jsonschema import exceptions
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY  # pyright: ignore[reportMissingTypeStubs]
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT7, DRAFT202012

from outbox_relay.sinks.kafka.encoder_base import (
    EncoderPlan,
    FoundSchema,
    Misfit,
    SchemaEncoder,
    Serialize,
    listed,
    path_of,
)
from outbox_relay.sinks.kafka.event_schemas import SchemaUnusable


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


def json_encoder(plan: EncoderPlan, _record: str | None) -> SchemaEncoder:
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
