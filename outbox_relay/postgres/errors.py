"""Translation of database errors into errors of the relay, without any text that may hold a secret or a payload."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import psycopg

from outbox_relay.domain.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    DatabaseUnusable,
    IncarnationChanged,
    NotFound,
    RelayError,
    RightMissing,
    StatementFailed,
)
from outbox_relay.postgres.conninfo import ENCODE

ANOTHER_SERVER: Final = "OR001"
"""The SQLSTATE with which ``outbox_internal.only_at`` refuses a statement."""

# Fixes by SQLSTATE or by its class (PostgreSQL, appendix A).
FIXES: Final = {
    "28": "check user name and password in the DSN, and pg_hba.conf",
    "3D": "create the database, or correct its name in the DSN",
    "3F": "run outbox-relay migrate",
    "42501": "run outbox-relay migrate --grant-relay ROLE (applications: --grant-emit; people: --grant-read, "
    "--grant-operate or --grant-payloads)",
    "42P01": "run outbox-relay migrate",
    "42883": "run outbox-relay migrate",
    "42703": "run outbox-relay migrate",
}
ROW_SECURITY: Final = "row-level security"
"""Part of the message of a refusal that no grant mends."""
ROW_SECURITY_FIX: Final = (
    "it hides rows from this role, so nothing is read: alter table outbox.NAME disable row level security, for each "
    "table that outbox-relay doctor lists"
)
REPLICA_FIX: Final = (
    "it is not origin in this session, so triggers of schema outbox would not fire: an administrator resets the "
    "default that sets it (alter role ROLE reset session_replication_role, also for the database; pg_db_role_setting "
    "lists it)"
)
NAMED_FIXES: Final = {
    ROW_SECURITY: ROW_SECURITY_FIX,
    "session_replication_role": REPLICA_FIX,
}
"""Fixes of refusals that no grant on schema outbox mends, by a part of the message."""
# Errors that pass without a fix: connection, transaction state and rollback, resources, object state, operator,
# system, internal.
TRANSIENT: Final = ("08", "25", "40", "53", "55", "57", "58", "XX")
# The session has ended or is of no use: connection exceptions, a server that stops, a session that was idle or a
# transaction that ran for too long, a server that has become a standby.
LOST: Final = ("08", "57P", "25P03", "25P04", "25006")
# Errors of one statement on a connection that still works: cardinality, values, constraints.
STATEMENT_ERRORS: Final = ("21", "22", "23")
# Errors whose messages quote values of the statement.
QUOTING: Final = ("21", "22", "23")

# libpq gives no SQLSTATE if it cannot connect, only the server's message, which is in English by default.
REFUSALS: Final = {
    "28000": re.compile(
        r"authentication failed|no pg_hba\.conf entry|^role .* does not exist|is not permitted to log in"
    ),
    "3D000": re.compile(r"^database .* does not exist"),
    "42501": re.compile(r"^permission denied for database"),
    "08P01": re.compile(r"^unsupported startup parameter|RDS Proxy .* support command-line options"),
}
SET_POOLER: Final = 'set database.pooler = "transaction", or OUTBOX_RELAY_DATABASE__POOLER=transaction for a command'
CONNECT_FIXES: Final = {
    "42501": "grant connect on the database to this user",
    "08P01": f"a pooler that keeps no session: {SET_POOLER}",
}
"""Advice for refused connections, where it differs from the advice for a refused statement."""
NOT_DIRECT: Final = f"a pooler keeps the settings of this connection from the server: {SET_POOLER}"
"""The error of a pooler that ignores them, as with ``ignore_startup_parameters = options``."""
SERVER_MESSAGE: Final = re.compile(r"(?:FATAL|ERROR): +(.+)")
KNOWN_PHRASES: Final = (
    "Connection refused",
    "No such file or directory",
    "Name or service not known",
    "No address associated with hostname",
    "Temporary failure in name resolution",
    "timeout expired",
    "timed out",
    "No route to host",
    "Network is unreachable",
    "Permission denied",
    "server closed the connection unexpectedly",
    "Connection reset by peer",
    "server does not support SSL",
    "certificate verify failed",
    "session is read-only",
    "session is not read-only",
    "server is in hot standby mode",
    "server is not in hot standby mode",
)
"""Phrases of libpq that are passed on. Other text may contain a part of a misread DSN, even its password."""
MALFORMED: Final = f"the DSN is not a connection string: {ENCODE}"
MALFORMED_MESSAGE: Final = re.compile(r"invalid .*connection option|invalid port number|Servname not supported")
UNSENT: Final = re.compile(r"placeholder|parameter missing|adapt|result")
"""psycopg's own refusals of a statement, of the class that refuses a malformed DSN too."""
NO_MEMORY: Final = re.compile(
    r'lost synchronization with server: got message type "D"|cannot allocate memory|out of memory'
)
"""Messages of libpq about a row that the memory of this process cannot hold. It gives up the connection, too."""


def encoding_fault(info: psycopg.ConnectionInfo) -> str | None:
    """Return an error message if the encoding of the database is not UTF8, or None. A pooler may not report it."""
    encoding = info.parameter_status("server_encoding")
    if encoding in (None, "", "UTF8"):
        return None
    return (
        f"this database has the encoding {encoding}, and the outbox needs UTF8: make a database with it "
        "(create database NAME encoding 'UTF8' template template0) and move the data there with pg_dump"
    )


def explain(error: psycopg.Error) -> RelayError:
    """Return ``DatabaseUnavailable`` for an error that passes, ``DatabaseUnusable`` for one that needs a fix.

    Return ``IncarnationChanged`` if another server than the caller's refused the statement.

    psycopg's own text may contain rows, passwords or whole DSNs. Only the primary message and the SQLSTATE of the
    server, and known phrases of libpq, are passed on.
    """
    if error.sqlstate:
        return _answered(error.sqlstate, error.diag.message_primary or "")
    if isinstance(error, psycopg.OperationalError):
        return _not_connected(error)
    if isinstance(error, psycopg.ProgrammingError) and not UNSENT.search(str(error)):
        return DatabaseUnusable(MALFORMED)
    return DatabaseUnavailable(f"the database could not be asked ({type(error).__name__})")


def is_starved(error: psycopg.Error) -> bool:
    """Return True if this process had no memory for the answer, for which libpq has ended the connection itself."""
    return not error.sqlstate and NO_MEMORY.search(str(error)) is not None


def explain_statement(error: Exception, name: str) -> RelayError:
    """Return the error for a failure of the statement ``name`` that says nothing about the server.

    Return ``StatementFailed`` if only the statement or its answer failed: it timed out, met a lock or a deadlock, needs
    too much memory, or has a value that cannot be loaded. Otherwise as ``explain``.
    """
    if isinstance(error, psycopg.Error) and is_starved(error):
        return StatementFailed(f"the answer of statement {name} is too large for the memory there is", "53200")
    if not isinstance(error, psycopg.Error) or not error.sqlstate:
        return StatementFailed(f"statement {name} failed, or its answer cannot be loaded ({type(error).__name__})")
    state, said = error.sqlstate, error.diag.message_primary or ""
    explained = _answered(state, said)
    ended = state.startswith(LOST) or error.diag.severity_nonlocalized in ("FATAL", "PANIC")
    if ended or isinstance(explained, IncarnationChanged):
        return explained
    if isinstance(explained, DatabaseUnavailable) or state.startswith(STATEMENT_ERRORS):
        quoted = "" if state.startswith(QUOTING) else f": {said}"
        return StatementFailed(f"the database ended statement {name} ({state}){quoted}", state)
    return explained


def explain_refusal(error: psycopg.Error, grant: str) -> RelayError | None:
    """Return the error for what a function of the schema refuses in words of its own, or None.

    ``grant`` is the kind of grant that a role without the right needs.
    """
    said = error.diag.message_primary or ""
    match error.sqlstate:
        case "P0002":
            hint = (error.diag.message_hint or "").rstrip(".")
            return NotFound(f"{said}; {hint[:1].lower()}{hint[1:]}" if hint else said)
        case "22023":
            return ConfigurationError(said)
        case "42501":
            refusal = f"the database says: {said} (42501)"
            if fix := _named_fix(said):
                return DatabaseUnusable(f"{refusal}: {fix}")
            return RightMissing(refusal, f"run outbox-relay migrate --grant-{grant} ROLE")
        case _:
            return None


@contextmanager
def action_refusals(grant: str) -> Generator[None]:
    """Raise what a function of the schema refuses to a person in the block, as ``explain_refusal`` does.

    Other errors are left as they are.
    """
    try:
        yield
    except psycopg.Error as error:
        if (refusal := explain_refusal(error, grant)) is None:
            raise
        raise refusal from None


@contextmanager
def advise_grant(kind: str) -> Generator[None]:
    """Name the grant of this kind in the error that the block raises if the role has no right to something."""
    try:
        yield
    except RightMissing as error:
        if error.advice != FIXES["42501"]:  # it names one grant already
            raise
        fix = f"run outbox-relay migrate --grant-{kind} ROLE as the owner of the schema"
        raise RightMissing(error.said, fix) from None


def _answered(state: str, said: str) -> RelayError:
    if state == ANOTHER_SERVER:
        return IncarnationChanged(said)
    if fix := _fix_of(state, said):
        refusal = f"the database says: {said} ({state})"
        return RightMissing(refusal, fix) if fix == FIXES["42501"] else DatabaseUnusable(f"{refusal}: {fix}")
    if state.startswith(TRANSIENT):
        return DatabaseUnavailable(f"the database says: {said} ({state})")
    return DatabaseUnusable(
        f"the database refused a statement ({state})" + ("" if state.startswith(QUOTING) else f": {said}")
    )


def _fix_of(state: str, said: str) -> str | None:
    if state == "42501" and (fix := _named_fix(said)):
        return fix
    return FIXES.get(state) or FIXES.get(state[:2])


def _named_fix(said: str) -> str | None:
    return next((fix for part, fix in NAMED_FIXES.items() if part in said), None)


def _not_connected(error: psycopg.OperationalError) -> RelayError:
    text = str(error)
    where = _where(error)
    if error.pgconn is not None and error.pgconn.needs_password:
        return DatabaseUnusable(f"the database{where} requires a password, and the DSN contains none: {FIXES['28']}")
    if fatal := SERVER_MESSAGE.search(text):
        for state, said in REFUSALS.items():
            if said.search(fatal[1]):
                return DatabaseUnusable(f"the database{where} says: {fatal[1]}: {_fix(state)}")
        return DatabaseUnavailable(f"the database{where} says: {fatal[1]}")
    if MALFORMED_MESSAGE.search(text):
        return DatabaseUnusable(MALFORMED)
    reason = next((reason for reason in KNOWN_PHRASES if reason in text), "for a reason that may hold a secret")
    return DatabaseUnavailable(f"no connection to the database{where}: {reason}")


def _fix(state: str) -> str:
    return CONNECT_FIXES.get(state) or FIXES[state[:2]]


def _where(error: psycopg.OperationalError) -> str:
    """Return host and port, unless they may be parts of a password that was not percent-encoded."""
    if error.pgconn is None:
        return ""
    try:
        host, port = error.pgconn.host.decode(), error.pgconn.port.decode()
    except (psycopg.Error, UnicodeDecodeError):
        return ""
    safe = re.fullmatch(r"(/[\w./-]+|[\w.:-]+)", host) and re.fullmatch(r"[0-9]*", port)
    return f" at {host}:{port}" if safe else ""
