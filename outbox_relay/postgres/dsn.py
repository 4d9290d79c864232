"""Hosts, ports and secrets of a connection string."""

from __future__ import annotations

from collections.abc import Mapping

import psycopg
from psycopg.pq import Conninfo

from outbox_relay.postgres.conninfo import fault, parsed

PORT = 5432
"""The default port of PostgreSQL."""
ENCRYPTING = frozenset(("require", "verify-ca", "verify-full"))
"""The values of ``sslmode`` that enforce encryption."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


__all__ = ["encrypts", "endpoints", "fault", "has_password", "place_of", "secret_files"]


def endpoints(dsn: str, environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the hosts (names or addresses) and ports that ``dsn`` may lead to. ``environ`` has libpq's fallbacks.

    A server behind a Unix socket usually listens on the loopback address too, at the same port. The list is empty if
    ``dsn`` is malformed. Service files are not read.
    """
    try:
        given = parsed(dsn)
    except psycopg.Error:
        return []
    hosts = _listed(given.get("host") or environ.get("PGHOST"))
    addresses = _listed(given.get("hostaddr") or environ.get("PGHOSTADDR"))
    ports = _listed(given.get("port") or environ.get("PGPORT"))
    found: list[tuple[str, int]] = []
    for n in range(max(len(hosts), len(addresses), 1)):
        text = ports[n] if n < len(ports) else ports[-1] if len(ports) == 1 else ""
        port = int(text) if text.isascii() and text.isdigit() else PORT
        names = [names[n] for names in (hosts, addresses) if n < len(names) and names[n]]
        local = not names or any(name.startswith(("/", "@")) for name in names)
        found += [(name, port) for name in (LOOPBACK if local else names)]
    return found


def place_of(dsn: str) -> str:
    """Return HOST:PORT/NAME of the database to which ``dsn`` leads, with libpq's defaults; empty if it is malformed."""
    try:
        given = {option.keyword.decode(): (option.val or b"").decode() for option in Conninfo.get_defaults()}
        given |= {name: str(value) for name, value in parsed(dsn).items()}
    except (psycopg.Error, UnicodeError):
        return ""
    hosts = _listed(given.get("host") or given.get("hostaddr")) or ["localhost"]
    ports = _listed(given.get("port")) or [str(PORT)]
    places = [f"{host}:{ports[n] if n < len(ports) else ports[-1]}" for n, host in enumerate(hosts)]
    return f"{','.join(places)}/{given.get('dbname') or given.get('user') or ''}"


def encrypts(dsn: str, environ: Mapping[str, str]) -> bool:
    """Return whether ``dsn`` enforces encryption. libpq's default, ``prefer``, falls back to plain text."""
    given = _parsed(dsn)
    root = given.get("sslrootcert") or environ.get("PGSSLROOTCERT")
    mode = given.get("sslmode") or environ.get("PGSSLMODE") or ("verify-full" if root == "system" else "prefer")
    gss = given.get("gssencmode") or environ.get("PGGSSENCMODE")
    return mode in ENCRYPTING or gss == "require"


def has_password(dsn: str) -> bool:
    """Return whether ``dsn`` itself contains a password."""
    given = _parsed(dsn)
    return bool(given.get("password") or given.get("sslpassword"))


def secret_files(dsn: str, environ: Mapping[str, str]) -> list[str]:
    """Return the files with a password or a key that libpq would use for ``dsn``, whether or not they exist."""
    given = _parsed(dsn)
    home = environ.get("HOME", "")
    found = [given.get("sslkey") or environ.get("PGSSLKEY")]
    if not given.get("password") and not environ.get("PGPASSWORD"):
        found.append(given.get("passfile") or environ.get("PGPASSFILE") or (f"{home}/.pgpass" if home else None))
    return [str(path) for path in found if path]


def _parsed(dsn: str) -> Mapping[str, object]:
    try:
        return parsed(dsn)
    except psycopg.Error:
        return {}


def _listed(value: object) -> list[str]:
    return [part.strip() for part in str(value).split(",")] if value else []
