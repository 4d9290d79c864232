"""The shape of the settings, read from the models: the names that a table may hold, and what a setting is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outbox_relay.settings.model import Settings
from outbox_relay.settings.sinks import SINKS, check_sink_name

Shape: TypeAlias = Literal["text", "list", "table"]


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of ``model`` by the names that they have in the file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def table(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a table with fixed names."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def members(path: Sequence[object], kinds: Mapping[str, str]) -> dict[str, FieldInfo]:
    """The settings that the table at ``path`` may hold; none when it is no table with fixed names.

    ``kinds`` tells the ``type`` of each sink; a sink whose type is not known may hold what any sink may.
    """
    if not path or path[0] != "sinks":
        return _descend(fields(Settings), path)
    if len(path) == 1:
        return {}
    known = SINKS.get(kinds.get(str(path[1]), ""))
    merged: dict[str, FieldInfo] = {}
    for model in (known,) if known else SINKS.values():
        merged |= fields(model)
    return _descend(merged, path[2:])


def _descend(found: dict[str, FieldInfo], path: Sequence[object]) -> dict[str, FieldInfo]:
    for step in path:
        field = found.get(str(step))
        model = table(field) if field else None
        if model is None:
            return {}
        found = fields(model)
    return found


def shape(path: Sequence[str], kinds: Mapping[str, str]) -> Shape | None:
    """What the setting at ``path`` is; nothing when there is none."""
    match path:
        case ():
            return "table"
        case ("routes",):
            return "table"
        case ("sinks", name):
            return "table" if _is_sink_name(name) else None
        case ("sinks", name, ("producer" | "producer_files") as setting, _):
            return "text" if setting in members(("sinks", name), kinds) else None
        case _:
            field = members(path[:-1], kinds).get(path[-1])
            return None if field is None else _shape_of(field)


def _shape_of(field: FieldInfo) -> Shape:
    origin = get_origin(field.annotation)
    if table(field) or origin is dict:
        return "table"
    return "list" if origin is tuple else "text"


def _is_sink_name(name: str) -> bool:
    try:
        check_sink_name(name)
    except ValueError:
        return False
    return True
