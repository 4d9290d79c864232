"""What a database error means for the relay: wait and try again, or tell somebody. Never the error's own text whole."""

from __future__ import annotations

import re
from typing import Final

import psycopg

from outbox_relay.domain.errors import (
    DatabaseUnavailable,
    DatabaseUnusable,
    IncarnationChanged,
    RelayError,
    StatementFailed,
)

ANOTHER_SERVER: Final = "OR001"
"""The SQLSTATE with which ``outbox.only_at`` refuses a statement."""

# PostgreSQL, appendix A. A whole class, or one state.
MENDING: Final = {
    "28": "check user name and password in the DSN, and pg_hba.conf",
    "3D": "create the database, or correct its name in the DSN",
    "3F": "run outbox-relay migrate",
    "42501": "run outbox-relay migrate --grant-relay ROLE (--grant-emit ROLE for applications)",
    "42P01": "run outbox-relay migrate",
    "42883": "run outbox-relay migrate",
    "42703": "run outbox-relay migrate",
}
# Connection, transaction state and rollback, resources, object state, operator, system, internal.
PASSING: Final = ("08", "25", "40", "53", "55", "57", "58", "XX")
# A session that has ended, or is worth nothing until it is made again: connection exceptions, a server that stops, a
# session that was idle or a transaction that ran for too long, a server that has become a standby.
LOST: Final = ("08", "57P", "25P03", "25P04", "25006")
# Errors of one statement that is sent over a connection that lives: values, cardinality, constraints.
FAILING: Final = ("21", "22", "23")
# Their messages quote what was sent.
QUOTING: Final = ("21", "22", "23")

# libpq gives no SQLSTATE when it cannot connect, only the server's words, which are English by default.
REFUSALS: Final = {
    "28000": re.compile(
        r"authentication failed|no pg_hba\.conf entry|^role .* does not exist|is not permitted to log in"
    ),
    "3D000": re.compile(r"^database .* does not exist"),
    "42501": re.compile(r"^permission denied for database"),
    "08P01": re.compile(r"^unsupported startup parameter"),
}
CONNECTING: Final = {
    "42501": "grant connect on the database to this user",
    "08P01": 'a pooler that keeps no session: set database.pooler = "transaction"',
}
"""Advice for refused connections, where it differs from the advice for a refused statement."""
SERVER_SAID: Final = re.compile(r"(?:FATAL|ERROR): +(.+)")
REASONS: Final = (
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
"""What libpq says that is passed on. Everything else may hold a piece of a DSN that was misread, its password even."""
MALFORMED: Final = (
    "the DSN is not a connection string: write postgresql://USER@HOST:5432/DATABASE, with special characters of the "
    "password percent-encoded"
)
MISREAD: Final = re.compile(r"invalid .*connection option|invalid port number|Servname not supported")
UNSENT: Final = re.compile(r"placeholder|parameter missing|adapt|result")
"""psycopg's own refusals of a statement, of the class that refuses a malformed DSN too."""


def encoding_fault(info: psycopg.ConnectionInfo) -> str | None:
    """Return what is wrong with the encoding of the database, or None. A pooler may not tell it."""
    encoding = info.parameter_status("server_encoding")
    if encoding in (None, "", "UTF8"):
        return None
    return (
        f"this database has the encoding {encoding}, and the outbox needs UTF8: make a database with it "
        "(create database NAME encoding 'UTF8' template template0) and move the data there with pg_dump"
    )


def explain(error: psycopg.Error) -> RelayError:
    """Return ``DatabaseUnavailable`` for what passes by itself, ``DatabaseUnusable`` for what a person must mend.

    ``IncarnationChanged`` for what another server than the caller's refused.
    psycopg's own text may hold rows, passwords or whole DSNs: of what the server answered only the primary message
    and the SQLSTATE are passed on, of what libpq says only known phrases.
    """
    if error.sqlstate:
        return _answered(error.sqlstate, error.diag.message_primary or "")
    if isinstance(error, psycopg.OperationalError):
        return _not_connected(error)
    if isinstance(error, psycopg.ProgrammingError) and not UNSENT.search(str(error)):
        return DatabaseUnusable(MALFORMED)
    return DatabaseUnavailable(f"the database could not be asked ({type(error).__name__})")


def explain_statement(error: Exception, name: str) -> RelayError:
    """Return what an error means that the statement ``name`` met on a connection that still lives.

    ``StatementFailed`` where nothing is wrong but the statement or its answer: it ran out of time, met a lock or a
    deadlock, needs more memory than there is, or holds a value that cannot be loaded. Else as ``explain`` does.
    """
    if not isinstance(error, psycopg.Error) or not error.sqlstate:
        return StatementFailed(f"statement {name} failed, or its answer cannot be loaded ({type(error).__name__})")
    state, said = error.sqlstate, error.diag.message_primary or ""
    explained = _answered(state, said)
    standby = name == "tick" and state == "55000"  # "recovery is in progress", in whatever language
    ended = state.startswith(LOST) or error.diag.severity_nonlocalized in ("FATAL", "PANIC")
    if ended or standby or isinstance(explained, IncarnationChanged):
        return explained
    if isinstance(explained, DatabaseUnavailable) or state.startswith(FAILING):
        quoted = "" if state.startswith(QUOTING) else f": {said}"
        return StatementFailed(f"the database ended statement {name} ({state}){quoted}", state)
    return explained


def _answered(state: str, said: str) -> RelayError:
    if state == ANOTHER_SERVER:
        return IncarnationChanged(said)
    mending = MENDING.get(state) or MENDING.get(state[:2])
    if mending:
        return DatabaseUnusable(f"the database says: {said} ({state}): {mending}")
    if state.startswith(PASSING):
        return DatabaseUnavailable(f"the database says: {said} ({state})")
    return DatabaseUnusable(
        f"the database refused a statement ({state})" + ("" if state.startswith(QUOTING) else f": {said}")
    )


def _not_connected(error: psycopg.OperationalError) -> RelayError:
    text = str(error)
    where = _where(error)
    if error.pgconn is not None and error.pgconn.needs_password:
        return DatabaseUnusable(f"the database{where} wants a password and the DSN has none: {MENDING['28']}")
    if fatal := SERVER_SAID.search(text):
        for state, said in REFUSALS.items():
            if said.search(fatal[1]):
                return DatabaseUnusable(f"the database{where} says: {fatal[1]}: {_mending(state)}")
        return DatabaseUnavailable(f"the database{where} says: {fatal[1]}")
    if MISREAD.search(text):
        return DatabaseUnusable(MALFORMED)
    reason = next((reason for reason in REASONS if reason in text), "for a reason that may hold a secret")
    return DatabaseUnavailable(f"no connection to the database{where}: {reason}")


def _mending(state: str) -> str:
    return CONNECTING.get(state) or MENDING[state[:2]]


def _where(error: psycopg.OperationalError) -> str:
    """Host and port, unless they may be pieces of a password that was not percent-encoded."""
    if error.pgconn is None:
        return ""
    try:
        host, port = error.pgconn.host.decode(), error.pgconn.port.decode()
    except (psycopg.Error, UnicodeDecodeError):
        return ""
    safe = re.fullmatch(r"(/[\w./-]+|[\w.:-]+)", host) and re.fullmatch(r"[0-9]*", port)
    return f" at {host}:{port}" if safe else ""
