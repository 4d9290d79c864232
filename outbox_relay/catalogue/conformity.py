"""Comparing stored payloads with their schema. A difference names places and types, and nothing of a payload."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn, cast

from outbox_relay.catalogue.documents import pointer

EXPECTED_CHARS: Final = 200
"""Longest text about the schema."""
TYPES: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


@dataclass(frozen=True)
class SchemaDifference:
    """The first difference of a payload from its schema: a JSON path, and the expected and the found type."""

    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, found {self.found}"


class PayloadValidator:
    """The schemas of a document of ``documents.json_schema``, by type. Needs jsonschema."""

    def __init__(self, document: dict[str, Any]) -> None:
        from jsonschema import Draft202012Validator, FormatChecker

        checker = FormatChecker(("uuid", "date"))
        checker.checks("date-time", raises=ValueError)(_is_date_time)
        self.types = sorted(document["$defs"])
        self._of: dict[str, Any] = {
            name: Draft202012Validator({**document, "$ref": pointer(name)}, format_checker=checker)
            for name in document["$defs"]
        }

    def difference(self, event_type: str, content_type: str, payload: bytes) -> SchemaDifference | None:
        """Return the first difference of a payload, or None."""
        from jsonschema.exceptions import best_match  # pyright: ignore[reportUnknownVariableType] - of its key

        if content_type.partition(";")[0].strip().lower() != "application/json":
            return SchemaDifference("$", "content type application/json", f"content type {content_type[:60]}")
        try:
            value = json.loads(payload, parse_constant=_refuse)
            error = cast(Any, best_match(self._of[event_type].iter_errors(value)))
        except RecursionError:
            return SchemaDifference("$", "fewer levels", "too many levels")
        except ValueError:
            return SchemaDifference("$", "JSON", "bytes that are not JSON")
        return None if error is None else _described(error)


def _described(error: Any) -> SchemaDifference:
    """Return an error of jsonschema without the value that caused it."""
    path = json_path(error.absolute_path, error.absolute_schema_path)
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in error.instance)
        properties: dict[str, Any] = error.schema.get("properties", {})
        return SchemaDifference(f"{path}.{missing}", _expected(properties.get(missing, {})), "no value")
    found = json_type(error.instance)
    match error.validator:
        case "type":
            return SchemaDifference(path, _names(error.validator_value), found)
        case "additionalProperties" | "unevaluatedProperties":
            return SchemaDifference(path, "no fields but those of the schema", "other fields")
        case _:
            stated = json.dumps(error.validator_value)[:EXPECTED_CHARS]
            return SchemaDifference(path, f"{error.validator} {stated}", found)


def json_path(path: Iterable[str | int], schema_path: Sequence[str | int]) -> str:
    """Return a JSON path. A name that the schema does not have may be data, and is shown as ``*``."""
    declared = set(map(str, schema_path))
    shown = (f"[{each}]" if isinstance(each, int) else f".{each if each in declared else '*'}" for each in path)
    return "$" + "".join(shown)


def json_type(value: object) -> str:
    """Return the name of the type of a JSON value."""
    return "null" if value is None else TYPES[type(value)]


def _expected(schema: dict[str, Any]) -> str:
    return _names(schema["type"]) if "type" in schema else "a value"


def _names(types: object) -> str:
    return " or ".join(cast("list[str]", types)) if isinstance(types, list) else str(types)


def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value).tzinfo is not None or "T" in value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")
