"""The tables ``[sinks.NAME]``: each is read by the model of its type, which may come from a plug-in."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationError,
    WithJsonSchema,
    field_validator,
)

from outbox_relay.fields import FUNCTION, Dsn, as_table, blank_is_none, matching, rule
from outbox_relay.raised import raised
from outbox_relay.settings.kafka import KafkaSettings
from outbox_relay.settings.problems import NAME_CHARS, InvalidSetting, Problem, problems_of, suggestion
from outbox_relay.settings.webhook import WebhookSettings
from outbox_relay.sinks import types
from outbox_relay.sinks.plugin.redaction import texts_in, without
from outbox_relay.sinks.settings import RequestSettings, SinkSettings
from outbox_relay.sinks.types import BUILTIN, SinkType, TypeRefused

BUILTIN_TYPES = " or ".join(f'"{kind}"' for kind in BUILTIN)
"""The types of the relay itself, for messages."""
_NO_HANDLER = 'should be "MODULE:FUNCTION", such as "shop.mail:send"'


class PythonSettings(RequestSettings):
    """A sink that calls a function of the application, the handler, in the process of the relay."""

    type: Literal["python"]  # pyright: ignore[reportIncompatibleVariableOverride] - narrower, and frozen
    """The kind of sink."""
    handler: Annotated[str, matching(FUNCTION, _NO_HANDLER)] = Field(max_length=255)
    """The function that is called with each delivery, "MODULE:FUNCTION"."""
    dsn: Annotated[Dsn | None, BeforeValidator(blank_is_none)] = Field(default=None, repr=False)
    """Connection string of the application's own role, for transaction."""
    transaction: Annotated[
        bool,
        rule(
            lambda value, earlier: (
                "needs dsn, the connection string of the application's own role"
                if value and earlier.get("dsn", value) is None
                else None
            )
        ),
    ] = False
    """Call the handler inside a transaction of a connection to dsn, which marks the event as handled."""

    @field_validator("cloudevents")
    @classmethod
    def _is_none(cls, value: str) -> str:
        if value != "none":
            raise ValueError("has no effect: a handler gets the event itself")
        return value


def _type_fault(kind: object) -> str:
    """Return the message for a type that no package has, without the type, and with the nearest names."""
    installed = types.plugins()
    others = ", ".join(f'"{_shown(name)}" of {packages}' for name, packages in installed.items())
    plugins = f", or a plug-in: {others}" if installed else ""
    nearest = suggestion(str(kind), [*BUILTIN, *map(_shown, installed)])
    return f"should be {BUILTIN_TYPES}{plugins}; {nearest}{'' if installed else '; no plug-in is installed'}"


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) <= NAME_CHARS else "…"


def _sink(value: Any) -> SinkSettings:
    table = as_table(value)
    if table is not value:
        raise ValueError("should be a table")
    kind = table.get("type")
    if kind is None:
        raise _refused(f"is required: {BUILTIN_TYPES}", "type")
    try:
        found = types.sink_type(kind) if isinstance(kind, str) else None
    except TypeRefused as error:
        raise _refused(str(error), "type") from None
    if found is None:
        raise _refused(_type_fault(kind), "type")
    try:
        return found.settings.model_validate(table) if found.plugin is None else _read_by_plugin(found, table)
    except ValidationError as error:
        raise InvalidSetting(problems_of(error, found.settings)) from None


def _refused(text: str, *path: str) -> InvalidSetting:
    return InvalidSetting([Problem(path, text)])


def _read_by_plugin(found: SinkType, table: dict[str, Any]) -> SinkSettings:
    """Return the settings. No text of the plug-in repeats a value of the table."""
    hidden = [*texts_in({name: value for name, value in table.items() if name not in SinkSettings.model_fields})]
    try:
        settings = found.settings.model_validate(table)
    except ValidationError as error:
        problems = problems_of(error, found.settings)
        raise InvalidSetting(Problem(each.path, without(each.text, hidden)) for each in problems) from None
    except Exception as error:
        raise _refused(f"the plug-in cannot read its settings: {raised(error)}") from None
    try:
        SinkSettings.model_validate({name: getattr(settings, name) for name in SinkSettings.model_fields})
    except ValidationError as error:
        fields = ", ".join(sorted({str(each["loc"][0]) for each in error.errors(include_input=False)}))
        text = f"the plug-in gives {fields} a meaning of its own, which the relay does not have"
        raise _refused(text) from None
    return settings


_OfPlugin: TypeAlias = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "properties": {"type": {"not": {"enum": [*BUILTIN]}}}, "required": ["type"]}),
]
Sink: TypeAlias = Annotated[
    SerializeAsAny[SinkSettings],
    PlainValidator(_sink, json_schema_input_type=KafkaSettings | WebhookSettings | PythonSettings | _OfPlugin),
]
"""The settings of a sink of any type."""
