"""Connection strings: their parsing, what is wrong with them, what they lead to, and texts without their secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from outbox_relay.domain.files import system_authorities
from outbox_relay.domain.redaction import without

ENCODE = "write postgresql://USER@HOST:5432/DATABASE, with special characters of the password percent-encoded"
SECRETS: Final = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
"""The parameters of a connection string that are secret."""
REDACTED: Final = "[redacted]"
PORT: Final = 5432
"""The default port of PostgreSQL."""
ENCRYPTING: Final = frozenset(("require", "verify-ca", "verify-full"))
"""The values of ``sslmode`` that enforce encryption."""
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


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


def redacted(text: str, dsn: str) -> str:
    """Return ``text`` with each secret of ``dsn`` replaced, unless it is a word that ``dsn`` has elsewhere too."""
    given = _parsed(dsn)
    if not given:
        return REDACTED
    secrets = {str(given.pop(name)) for name in SECRETS if given.get(name)}
    for secret in sorted(secrets - set(map(str, given.values())), key=len, reverse=True):
        text = without(text, secret, REDACTED, anywhere=False)
    return text


def find_authorities(dsn: str) -> None:
    """Let ``sslrootcert=system`` mean the authorities that this system trusts, unless the environment names others.

    The OpenSSL inside psycopg's wheel looks for them where the machine that built it keeps them.
    """
    root = _parsed(dsn).get("sslrootcert") or os.environ.get("PGSSLROOTCERT")
    if root == "system" and not os.environ.get("SSL_CERT_FILE") and (authorities := system_authorities()):
        os.environ["SSL_CERT_FILE"] = authorities


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
    ends: list[tuple[str, int]] = []
    for n in range(max(len(hosts), len(addresses), 1)):
        text = ports[n] if n < len(ports) else ports[-1] if len(ports) == 1 else ""
        port = int(text) if text.isascii() and text.isdigit() else PORT
        names = [names[n] for names in (hosts, addresses) if n < len(names) and names[n]]
        local = not names or any(name.startswith(("/", "@")) for name in names)
        ends += [(name, port) for name in (LOOPBACK if local else names)]
    return ends


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
    return mode in ENCRYPTING or (given.get("gssencmode") or environ.get("PGGSSENCMODE")) == "require"


def has_password(dsn: str) -> bool:
    """Return whether ``dsn`` itself contains a password."""
    given = _parsed(dsn)
    return bool(given.get("password") or given.get("sslpassword"))


def secret_files(dsn: str, environ: Mapping[str, str]) -> list[str]:
    """Return the files with a password or a key that libpq would use for ``dsn``, whether or not they exist."""
    given = _parsed(dsn)
    home = environ.get("HOME", "")
    files = [given.get("sslkey") or environ.get("PGSSLKEY")]
    if not given.get("password") and not environ.get("PGPASSWORD"):
        files.append(given.get("passfile") or environ.get("PGPASSFILE") or (f"{home}/.pgpass" if home else None))
    return [str(path) for path in files if path]


def _parsed(dsn: str) -> dict[str, Any]:
    """Return the parameters of ``dsn``, none if it is malformed."""
    try:
        return parsed(dsn)
    except psycopg.Error:
        return {}


def _listed(value: object) -> list[str]:
    return [part.strip() for part in str(value).split(",")] if value else []
