"""The parsing of connection strings."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

ENCODE = "write postgresql://USER@HOST:5432/DATABASE, with special characters of the password percent-encoded"


def parsed(dsn: str) -> dict[str, Any]:
    """Return the parameters of ``dsn``, by name.

    Raises ``psycopg.ProgrammingError`` if it is malformed, also if its percent-encoding is not that of UTF-8.
    """
    try:
        return conninfo_to_dict(dsn)
    except UnicodeDecodeError:  # it would quote a part of the password
        raise psycopg.ProgrammingError("invalid connection option: not UTF-8") from None


def fault(dsn: str) -> str | None:
    """Return what is wrong with ``dsn``, without quoting it; None if it can be parsed and its host can be one."""
    try:
        host = str(parsed(dsn).get("host") or "")
    except psycopg.Error:
        return f"it is not a connection string: {ENCODE}"
    names = [name.strip().lstrip("@") for name in host.split(",")]  # that of an abstract socket begins with one
    if any("@" in name for name in names):
        return f"its host has an @, which probably belongs to the password (%40 there): {ENCODE}"
    return None
