"""Connection strings in settings."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, SecretStr


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


Dsn: TypeAlias = Annotated[SecretStr, AfterValidator(lambda value: SecretStr(checked_dsn(value.get_secret_value())))]
"""A connection string, which may contain a password."""
