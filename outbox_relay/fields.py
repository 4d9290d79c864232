"""Base class, types and validators that the models of settings share: those of the file, and those of sinks."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    model_validator,
)

from outbox_relay.domain.files import read_file

T = TypeVar("T")
STRICTNESS = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)
"""Immutable, no unknown names, no value in an error, no infinity."""
SMALL_FILE_BYTES = 64 * 1024
"""Size limit of files that hold secrets, in bytes."""
FUNCTION = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
"""A pattern of ``MODULE:FUNCTION``."""


class Section(BaseModel):
    """A table of the file."""

    model_config = STRICTNESS


def names(table: type[object]) -> dict[str, Any]:
    """Return the annotations of the settings in a table by their names in the file; none if ``table`` is no table."""
    if issubclass(table, BaseModel):
        return {field.alias or name: field.annotation for name, field in table.model_fields.items()}
    return {each.name: each.type for each in dataclasses.fields(table)} if dataclasses.is_dataclass(table) else {}


def entries(table: object) -> Mapping[str, Any] | None:
    """Return the settings in a table by their names in the file; None if ``table`` is no table."""
    if isinstance(table, BaseModel):
        return {field.alias or name: getattr(table, name) for name, field in type(table).model_fields.items()}
    if dataclasses.is_dataclass(table) and not isinstance(table, type):
        return {each.name: getattr(table, each.name) for each in dataclasses.fields(table)}
    return cast("Mapping[str, Any]", table) if isinstance(table, Mapping) else None


def as_table(value: object) -> dict[str, Any]:
    """Return ``value`` if it is a table of TOML or JSON, otherwise an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return ``value`` if it is a list, otherwise an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def listed(value: object) -> object:
    """Return a list with a text that stands alone, as environment variables have it, and any other value unchanged."""
    return [value] if isinstance(value, str) else value


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


def checked_dsn(text: str) -> str:
    """Return a connection string without blanks around it. Raises ValueError, without the text, if it is none."""
    dsn = text.strip()
    if not dsn:
        raise ValueError("is empty")
    if not dsn.isprintable():
        raise ValueError("holds a line break or a control character")
    if not dsn.startswith(("postgresql://", "postgres://")) and "=" not in dsn:
        raise ValueError(
            'should be "postgresql://USER@HOST:PORT/DATABASE" or pairs such as "host=HOST dbname=DATABASE"'
        )
    return dsn


def blank_is_none(value: object) -> object:
    """Return None for a text of blanks, and any other value unchanged."""
    return None if isinstance(value, str) and not value.strip() else value


Dsn = Annotated[SecretStr, AfterValidator(lambda value: SecretStr(checked_dsn(value.get_secret_value())))]
"""A connection string, which may contain a password."""


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


def is_place(value: object) -> bool:
    """Return True if ``value`` is a table that names the place of a secret."""
    table = as_table(value)
    named = all(isinstance(each, str | Path) and str(each) for each in table.values())
    return named and table.keys() in ({"file"}, {"env"})


def _table_with(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string"}},
        "required": [name],
        "additionalProperties": False,
    }


class Secret(Section):
    """A secret: text in the file, or a table that names its place, a file or a variable of the environment."""

    text: SecretStr | None = Field(default=None, repr=False)
    """The secret itself."""
    file: Path | None = None
    """The file that holds it, with or without a line break at its end."""
    env: str | None = None
    """The environment variable that holds it."""

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: object) -> object:
        if isinstance(value, Secret):
            return value
        if isinstance(value, str):
            return {"text": value}
        if not is_place(value):
            raise ValueError('should be text, or a table { file = "PATH" } or { env = "NAME" }')
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: object) -> dict[str, Any]:
        """Return the schema of the forms in the file."""
        return {"anyOf": [{"type": "string"}, *map(_table_with, ("file", "env"))]}

    def read(self, parse: Callable[[str], T]) -> T:
        """Return what ``parse`` makes of the secret. Blocks while a small file is read.

        Raises ValueError, with the place of the secret and nothing of it, if there is none or ``parse`` refuses it.
        """
        if self.text is not None:
            return parse(self.text.get_secret_value())
        try:
            found = os.environ[self.env] if self.env else read_text(self.file or Path())
            return parse(_not_empty(found.removesuffix("\n").removesuffix("\r")))
        except KeyError:
            raise ValueError(f"the variable {self.env} is not set") from None
        except ValueError as error:
            raise ValueError(f"{self.file or f'the variable {self.env}'}: {error}") from None


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("is empty")
    return text


def parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return a validator that refuses a secret whose text in the file ``parse`` refuses. No file is read."""

    def check(value: Secret) -> Secret:
        if value.text is not None:
            value.read(parse)
        return value

    return AfterValidator(check)
