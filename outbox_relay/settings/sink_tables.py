"""The tables ``[sinks.NAME]``: each is read by the model of its type, which may come from a plug-in."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator, SerializeAsAny, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from outbox_relay.fields import as_table
from outbox_relay.raised import raised
from outbox_relay.settings.problems import NAME_CHARS, InvalidSetting, Problem, suggestion
from outbox_relay.sinks import types
from outbox_relay.sinks.plugin.redaction import texts_in, without
from outbox_relay.sinks.settings import SinkSettings
from outbox_relay.sinks.types import BUILTIN, SinkType, TypeRefused

BUILTIN_TYPES = " or ".join(f'"{kind}"' for kind in BUILTIN)
"""The types of the relay itself, for messages."""


class InvalidTable(ValueError):
    """A table that the model of its ``kind`` refuses, for the reasons in ``errors``."""

    def __init__(self, kind: str, errors: list[ErrorDetails]) -> None:
        super().__init__(f"does not fit {kind}")
        self.kind = kind
        self.errors = errors


def type_fault(kind: str) -> str:
    """Return the message for a type that no package has, without the type, and with the nearest names."""
    installed = types.plugins()
    others = ", ".join(f'"{_shown(name)}" of {packages}' for name, packages in installed.items())
    plugins = f", or a plug-in: {others}" if installed else ""
    none = "" if installed else "; no plug-in is installed"
    return f"should be {BUILTIN_TYPES}{plugins}; {suggestion(kind, [*BUILTIN, *map(_shown, installed)])}{none}"


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) <= NAME_CHARS else "…"


def known_type(kind: object) -> SinkType | None:
    """Return the type ``kind``, or None if there is none, or none that can be used."""
    try:
        return types.sink_type(kind) if isinstance(kind, str) else None
    except TypeRefused:
        return None


def _sink(value: Any) -> SinkSettings:
    if isinstance(value, SinkSettings):
        return value
    table = as_table(value)
    if table is not value:
        raise PydanticCustomError("model_attributes_type", "should be a table")
    kind = table.get("type")
    if kind is None:
        raise PydanticCustomError("union_tag_not_found", "is required")
    try:
        found = types.sink_type(kind) if isinstance(kind, str) else None
    except TypeRefused as error:
        raise InvalidSetting([Problem(("type",), str(error))]) from None
    if found is None:
        raise PydanticCustomError("union_tag_invalid", "is unknown", {"tag": str(kind)})
    return _read(found, table) if found.plugin is None else _read_by_plugin(found, table)


def _read(found: SinkType, table: dict[str, Any]) -> SinkSettings:
    try:
        return found.settings.model_validate(table)
    except ValidationError as error:
        raise InvalidTable(found.name, error.errors(include_input=False, include_url=False)) from None


def _read_by_plugin(found: SinkType, table: dict[str, Any]) -> SinkSettings:
    """Return the settings. No text of the plug-in repeats a value of the table."""
    hidden = [*texts_in({name: value for name, value in table.items() if name not in SinkSettings.model_fields})]
    try:
        settings = _read(found, table)
    except InvalidTable as error:
        raise InvalidTable(error.kind, [_without_values(each, hidden) for each in error.errors]) from None
    except Exception as error:
        raise _refused(f"cannot read its settings: {raised(error)}") from None
    try:
        SinkSettings.model_validate({name: getattr(settings, name) for name in SinkSettings.model_fields})
    except ValidationError as error:
        fields = ", ".join(sorted({str(each["loc"][0]) for each in error.errors(include_input=False)}))
        raise _refused(f"gives {fields} a meaning of its own, which the relay does not have") from None
    return settings


def _refused(said: str) -> InvalidSetting:
    return InvalidSetting([Problem((), f"the plug-in {said}")])


def _without_values(details: ErrorDetails, hidden: list[str]) -> ErrorDetails:
    found: ErrorDetails = {
        "type": details["type"],
        "loc": details["loc"],
        "msg": without(details["msg"], hidden),
        "input": None,
    }
    return found


Sink: TypeAlias = Annotated[SerializeAsAny[SinkSettings], PlainValidator(_sink)]
"""The settings of a sink of any type."""
