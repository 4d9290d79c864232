"""Base class, types and validators that the models of settings share: those of the file, and those of sinks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo
from pydantic.fields import FieldInfo

from outbox_relay.domain.files import read_file

STRICTNESS = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)
"""Immutable, no unknown names, no value in an error, no infinity."""
SMALL_FILE_BYTES = 64 * 1024
"""Size limit of files that hold secrets, in bytes."""
FUNCTION = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
"""A pattern of ``MODULE:FUNCTION``."""


class Section(BaseModel):
    """A table of the file."""

    model_config = STRICTNESS


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of ``model`` by their names in the file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def table(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the model of a field that is a table with fixed names, otherwise None."""
    annotation = field.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def as_table(value: object) -> dict[str, Any]:
    """Return ``value`` if it is a table of TOML or JSON, otherwise an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return ``value`` if it is a list, otherwise an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def read_text(path: Path, limit: int = SMALL_FILE_BYTES) -> str:
    """Return the text in the file at ``path``, of at most ``limit`` bytes. Raises ValueError without any content."""
    try:
        content = read_file(path, limit)
        if len(content) > limit:
            raise ValueError(f"is larger than {limit} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(error.strerror) from None
    except UnicodeDecodeError:
        raise ValueError("is not a text file in UTF-8") from None


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("should be a number")  # noqa: TRY004 - pydantic collects ValueError
    return value


Count = Annotated[int, BeforeValidator(_no_boolean)]
"""A whole number; true and false are refused."""
Number = Annotated[float, BeforeValidator(_no_boolean)]
"""A number, with or without a fraction; true and false are refused."""


def rule(fault: Callable[[Any, Mapping[str, Any]], str | None]) -> AfterValidator:
    """Return a validator that refuses a value for the reason that ``fault`` returns, if it returns one.

    ``fault`` is called with the value and the earlier fields of the table, without those that were refused.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        if reason := fault(value, info.data):
            raise ValueError(reason)
        return value

    return AfterValidator(check)


def matching(pattern: str, reason: str) -> AfterValidator:
    """Return a validator that refuses, with ``reason``, text that ``pattern`` does not match as a whole."""
    return rule(lambda text, _: None if re.fullmatch(pattern, text) else reason)


def needs(other: str) -> AfterValidator:
    """Return a validator that refuses a value without the earlier field ``other``."""
    reason = f"needs {other}, to which it belongs"
    return rule(lambda value, earlier: reason if value is not None and earlier.get(other, value) is None else None)


def excludes(other: str, name: str = "") -> AfterValidator:
    """Return a validator that refuses a value beside the earlier field ``other``, which the file calls ``name``."""
    reason = f"excludes {name or other}: give one of the two"
    return rule(lambda value, earlier: reason if value is not None and earlier.get(other) else None)


def not_below(other: str) -> AfterValidator:
    """Return a validator that refuses a number below the earlier field ``other``."""

    def fault(value: float, earlier: Mapping[str, Any]) -> str | None:
        least = earlier.get(other, value)
        return f"is {value:g}, should not be below {other}, which is {least:g}" if value < least else None

    return rule(fault)
