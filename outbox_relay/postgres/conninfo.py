"""The parsing of connection strings."""

from __future__ import annotations

import os
import re
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from outbox_relay.domain.authorities import system_authorities

ENCODE = "write postgresql://USER@HOST:5432/DATABASE, with special characters of the password percent-encoded"
SECRETS: Final = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
"""The parameters of a connection string that are secret."""
REDACTED: Final = "[redacted]"


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
    try:
        given = parsed(dsn)
    except psycopg.Error:
        return REDACTED
    secrets = {str(given.pop(name)) for name in SECRETS if given.get(name)}
    for secret in sorted(secrets - {str(value) for value in given.values()}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", REDACTED, text)
    return text


def find_authorities(dsn: str) -> None:
    """Let ``sslrootcert=system`` mean the authorities that this system trusts, unless the environment names others.

    The OpenSSL inside psycopg's wheel looks for them where the machine that built it keeps them.
    """
    if os.environ.get("SSL_CERT_FILE") or not _wants_authorities(dsn):
        return
    if found := system_authorities():
        os.environ["SSL_CERT_FILE"] = found


def _wants_authorities(dsn: str) -> bool:
    try:
        given = parsed(dsn).get("sslrootcert")
    except psycopg.Error:
        return False
    return (given or os.environ.get("PGSSLROOTCERT")) == "system"
