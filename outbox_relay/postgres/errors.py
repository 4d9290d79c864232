"""Translation of database errors into errors of the relay, without any secret or payload."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import chain
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
from outbox_relay.postgres.conninfo import ENCODE, fault, redacted

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
    "08P01": re.compile(r"(startup|command.line) (option|parameter)s?|\boptions?\b.* not? .*\bsupport", re.IGNORECASE),
    "28000": re.compile(
        r"authentication failed|no pg_hba\.conf entry|pg_hba\.conf rejects|^role .* does not exist|client certificate|"
        r"is not permitted to log in|^no such user|password .* is wrong|[Uu]ser not found|SSL required|requires TLS|"
        r"connection is insecure"
    ),
    "3D000": re.compile(r"^database .* does not exist|^no such database"),
    "42501": re.compile(r"^permission denied for database"),
    "22023": re.compile(
        r"^unrecognized configuration parameter|^invalid value for parameter|^permission denied to set parameter|"
        r"^parameter .* (cannot be|requires)|^invalid command-line argument|^-.* requires a value"
    ),
}
SET_POOLER: Final = 'set database.pooler = "transaction", or OUTBOX_RELAY_DATABASE__POOLER=transaction for a command'
CONNECT_FIXES: Final = {
    "42501": "grant connect on the database to this user",
    "08P01": f"a pooler that keeps no session: {SET_POOLER}",
    "22023": "correct the options in the DSN, or PGOPTIONS",
}
"""Advice for refused connections, where it differs from the advice for a refused statement."""
NOT_DIRECT: Final = f"a pooler keeps the settings of this connection from the server: {SET_POOLER}"
"""The error of a pooler that ignores them, as with ``ignore_startup_parameters = options``."""
SERVER_MESSAGE: Final = re.compile(r"^(?:FATAL|ERROR|PANIC): +(.+)")
CORRECT: Final = "correct the DSN, or the file that it names"
FAULTS: Final = {
    re.compile(r"certificate verify failed"): "name the authority that signed the server's certificate, with "
    "sslrootcert in the DSN or, for sslrootcert=system, with SSL_CERT_FILE",
    re.compile(r"does not match host name"): "let host in the DSN be a name of the certificate; hostaddr may be any",
    re.compile(
        r"root certificate|private key|(certificate|key|crl) file|revocation list|host name (must be|from)|SSL value|"
        r"server does not support (SSL|GSSAPI)|GSSAPI encryption required|SSL error: (?!unexpected eof)|weak sslmode|"
        r"channel binding required|authentication method|^invalid |^could not match|is too long|^bad value|"
        r"definition of service|service file|local user|no password supplied"
    ): CORRECT,
}
"""libpq's words for a fault of the DSN, its files or the server's certificate → the fix. Waiting mends none of them."""
UNCHECKED: Final = re.compile(r"host '[^\n]*?'")
"""A host of a DSN that is not at hand, which may be a part of a misread password."""
SEVERAL: Final = "Multiple connection attempts failed. All failures were:\n"
ATTEMPT: Final = re.compile(r"^- host: '?(?P<host>.*?)'?, port: '?(?P<port>\w*?)'?, hostaddr: [^ ]*: ", re.MULTILINE)
"""psycopg's heading of each of several attempts."""
PREFIX: Final = re.compile(
    r"connection (?:failed|is bad): |consuming input failed: |connection to server (?:at|on socket) \".*?\".*? failed: "
)
"""psycopg's and libpq's words before a reason."""
REASON_CHARS: Final = 300
"""Longest reason that is quoted."""
MALFORMED: Final = f"the DSN is not a connection string: {ENCODE}"
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


def explain(error: psycopg.Error, dsn: str | None = None) -> RelayError:
    """Return ``DatabaseUnavailable`` for an error that passes, ``DatabaseUnusable`` for one that needs a fix.

    Return ``IncarnationChanged`` if another server than the caller's refused the statement. ``dsn`` is the connection
    string of a connection that was not made, whose secrets are replaced in libpq's text.

    Of an answer of the server only the primary message and the SQLSTATE are passed on: its details may contain rows.
    """
    if error.sqlstate:
        return _answered(error.sqlstate, error.diag.message_primary or "")
    if isinstance(error, psycopg.OperationalError):
        return _not_connected(error, dsn)
    if isinstance(error, psycopg.ProgrammingError) and not UNSENT.search(str(error)):
        if dsn is None or fault(dsn):
            return DatabaseUnusable(MALFORMED)
        return DatabaseUnusable(f"the DSN cannot be used: {redacted(str(error), dsn)}")
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


def _not_connected(error: psycopg.OperationalError, dsn: str | None) -> RelayError:
    if dsn is not None and (wrong := fault(dsn)):  # a part of the password may have been taken for a host
        return DatabaseUnusable(f"the DSN cannot be used: {wrong}")
    where = _where(error)
    if error.pgconn is not None and error.pgconn.needs_password:
        return DatabaseUnusable(f"the database{where} requires a password, and the DSN contains none: {FIXES['28']}")
    text = str(error) if dsn is not None else UNCHECKED.sub("host", str(error))
    attempts = list(dict.fromkeys(_attempts(text, where)))
    reasons = list(chain.from_iterable(reasons for _, reasons in attempts))
    connecting = dsn is not None or error.pgconn is not None
    # A host that may come back is waited for. With sslmode=prefer the attempt without TLS comes last.
    fixes = [_fix(reasons[-1]) for _, reasons in attempts if reasons] if connecting else []
    fix = fixes[0] if fixes and all(fixes) else None
    told = [(place, "; ".join(SERVER_MESSAGE.sub(r"\1", reason) for reason in reasons)) for place, reasons in attempts]
    if len(told) > 1:
        said = "no connection to the database: " + "; ".join(f"{place.strip()}: {why}" for place, why in told)
    elif all(map(SERVER_MESSAGE.match, reasons)):
        said = f"the database{told[0][0]} says: {told[0][1]}"
    else:
        said = f"no connection to the database{told[0][0]}: {told[0][1]}"
    said = said if dsn is None else redacted(said, dsn)
    return DatabaseUnavailable(said) if fix is None else DatabaseUnusable(f"{said}: {fix}")


def _attempts(text: str, where: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the place of each attempt to connect, and the reasons why it failed, without libpq's remarks."""
    _, several, failures = text.partition(SEVERAL)
    if not several:
        yield where, _reasons(text)
        return
    places = list(ATTEMPT.finditer(failures))
    ends = [place.start() for place in places[1:]] + [len(failures)]
    for place, end in zip(places, ends, strict=True):
        yield f" at {place['host']}:{place['port']}", _reasons(failures[place.end() : end])


def _reasons(text: str) -> tuple[str, ...]:
    """Return what was said of one attempt, which is two with ``sslmode=prefer``: with TLS, and without."""
    reasons: dict[str, None] = {}
    for part in PREFIX.split(text):
        lines = [line for line in part.strip().splitlines() if not line.startswith("\t")]
        if lines:
            reasons[lines[0] if SERVER_MESSAGE.match(lines[0]) else ". ".join(lines).rstrip(".")] = None
    return tuple(reason[:REASON_CHARS] for reason in reasons)


def _fix(reason: str) -> str | None:
    """Return the fix for a reason that waiting does not mend, or None."""
    if fatal := SERVER_MESSAGE.match(reason):
        state = next((state for state, said in REFUSALS.items() if said.search(fatal[1])), None)
        return state and (CONNECT_FIXES.get(state) or FIXES[state[:2]])
    return next((fix for said, fix in FAULTS.items() if said.search(reason)), None)


def _where(error: psycopg.OperationalError) -> str:
    if error.pgconn is None:
        return ""
    try:
        host, port = error.pgconn.host.decode(), error.pgconn.port.decode()
    except (psycopg.Error, UnicodeDecodeError):
        return ""
    return f" at {host}:{port}" if host else ""
