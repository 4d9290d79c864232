"""The documents of a catalogue: one JSON Schema with every event, and an AsyncAPI 3 document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import quote

from outbox_relay.catalogue.declaration import EventDeclaration

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
ASYNCAPI: Final = "3.0.0"
KAFKA_BINDING: Final = "0.5.0"
MARK: Final = "x-outbox-catalogue"
"""The key of a document that `--against` reads, with the version of its form."""
FORM: Final = 1

Declarations = Mapping[str, EventDeclaration]
"""The declarations of a catalogue by type."""


def json_schema(declared: Declarations, title: str) -> dict[str, Any]:
    """Return one JSON Schema whose ``$defs`` have the schema of each event under its type."""
    return {
        "$schema": DIALECT,
        MARK: FORM,
        "title": title,
        "$defs": {name: each.schema(f"{pointer(name)}/$defs/{{name}}") for name, each in sorted(declared.items())},
    }


def pointer(event_type: str) -> str:
    """Return the reference of the schema of a type in the document."""
    escaped = event_type.replace("~", "~0").replace("/", "~1")
    return f"#/$defs/{quote(escaped, safe='~')}"


def asyncapi(declared: Declarations, title: str, version: str, topic: str | None) -> dict[str, Any]:
    """Return an AsyncAPI document in which the relay sends every event over a channel of its own.

    ``topic`` is the address of the channels, with ``{type}`` in the place of the type; None if it is not known.
    """
    names = _names(declared)
    messages = {names[each]: _message(names[each], declaration) for each, declaration in sorted(declared.items())}
    return {
        "asyncapi": ASYNCAPI,
        "info": {"title": title, "version": version},
        "defaultContentType": "application/json",
        "channels": {
            names[each]: {
                "address": None if topic is None else topic.replace("{type}", each),
                "messages": {names[each]: {"$ref": f"#/components/messages/{names[each]}"}},
            }
            for each in sorted(declared)
        },
        "operations": {
            names[each]: {
                "action": "send",
                "channel": {"$ref": f"#/channels/{names[each]}"},
                "messages": [{"$ref": f"#/channels/{names[each]}/messages/{names[each]}"}],
            }
            for each in sorted(declared)
        },
        "components": {"messages": messages},
    }


def _message(name: str, declaration: EventDeclaration) -> dict[str, Any]:
    schema = declaration.schema(f"#/components/messages/{name}/payload/$defs/{{name}}")
    headers = {"id": {"type": "string", "format": "uuid"}, "type": {"const": declaration.type}}
    keyed = {"bindings": {"kafka": {"key": {"type": "string"}, "bindingVersion": KAFKA_BINDING}}}
    return {
        "name": declaration.type,
        "title": declaration.of.__name__,
        "contentType": "application/json",
        "headers": {"type": "object", "properties": headers, "required": list(headers)},
        "payload": _as_draft_07(schema),
        **(keyed if declaration.key is not None else {}),
    }


def _as_draft_07(schema: Any) -> Any:
    """Return a schema of 2020-12 in the dialect of AsyncAPI, whose tuples are ``items``."""
    if isinstance(schema, list):
        return [_as_draft_07(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    found = {name: _as_draft_07(value) for name, value in cast("dict[str, Any]", schema).items()}
    if isinstance(found.get("prefixItems"), list):
        if "items" in found:
            found["additionalItems"] = found.pop("items")
        found["items"] = found.pop("prefixItems")
    return found


def _names(declared: Declarations) -> dict[str, str]:
    """Return a name of components for each type, with a number where two types would have the same."""
    found: dict[str, str] = {}
    for each in sorted(declared):
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", each)
        name, number = plain, 1
        while name in found.values():
            number += 1
            name = f"{plain}_{number}"
        found[each] = name
    return found
