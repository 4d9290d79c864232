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
    except UnicodeError:  # it would quote a part of the password
        raise psycopg.ProgrammingError("invalid connection option: not UTF-8") from None


def fault(dsn: str) -> str | None:
    """Return what is wrong with ``dsn``, without quoting it; None if it can be parsed and its host can be one."""
    try:
        given = parsed(dsn)
    except psycopg.Error:
        return f"it is not a connection string: {ENCODE}"
    hosts, ports = (str(given.get(name) or "").split(",") for name in ("host", "port"))
    names = [host.strip().lstrip("@") for host in hosts if not host.strip().startswith("/")]
    is_uri = dsn.lower().startswith(("postgres://", "postgresql://"))
    if any("@" in name for name in names) or (is_uri and "@" in str(given.get("dbname") or "")):
        return f"it has an @ in a wrong place, which probably belongs to the password (%40 there): {ENCODE}"
    if any(port.strip() and not port.strip().isdecimal() for port in ports):
        return f"its port is not a number, so a part of the password was probably taken for it: {ENCODE}"
    return None
