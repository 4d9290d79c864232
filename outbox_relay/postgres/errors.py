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
from outbox_relay.postgres.dsn import ENCODE, fault, redacted

ANOTHER_SERVER: Final = "OR001"
"""The SQLSTATE with which ``outbox_internal.only_at`` refuses a statement."""
GRANT: Final = (
    "run outbox-relay migrate --grant-relay ROLE (applications: --grant-emit; people: --grant-read, --grant-operate or "
    "--grant-payloads)"
)
MIGRATE: Final = "run outbox-relay migrate"
LOGIN: Final = "check user name and password in the DSN, and pg_hba.conf"
NO_DATABASE: Final = "create the database, or correct its name in the DSN"
SET_POOLER: Final = 'set database.pooler = "transaction", or OUTBOX_RELAY_DATABASE__POOLER=transaction for a command'
NOT_DIRECT: Final = f"a pooler keeps the settings of this connection from the server: {SET_POOLER}"
"""The error of a pooler that ignores them, as with ``ignore_startup_parameters = options``."""
FIXES: Final = (
    ("42501", r"row-level security", "it hides rows from this role, so nothing is read: alter table outbox.NAME "
     "disable row level security, for each table that outbox-relay doctor lists"),
    ("42501", r"session_replication_role", "it is not origin in this session, so triggers of schema outbox would not "
     "fire: an administrator resets the default that sets it (alter role ROLE reset session_replication_role, also for "
     "the database; pg_db_role_setting lists it)"),
    ("42501", "", GRANT),
    ("28", "", LOGIN),
    ("3D", "", NO_DATABASE),
    ("3F", "", MIGRATE),
    ("42P01", "", MIGRATE),
    ("42883", "", MIGRATE),
    ("42703", "", MIGRATE),
    (None, r"(?i)(startup|command.line) (option|parameter)s?|\boptions?\b.* not? .*\bsupport",
     f"a pooler that keeps no session: {SET_POOLER}"),
    (None, r"authentication failed|no pg_hba\.conf entry|pg_hba\.conf rejects|^role .* does not exist|"
     r"client certificate|is not permitted to log in|^no such user|password .* is wrong|[Uu]ser not found|SSL required|"
     r"requires TLS|connection is insecure", LOGIN),
    (None, r"^database .* does not exist|^no such database", NO_DATABASE),
    (None, r"^permission denied for database", "grant connect on the database to this user"),
    (None, r"^unrecognized configuration parameter|^invalid value for parameter|^permission denied to set parameter|"
     r"^parameter .* (cannot be|requires)|^invalid command-line argument|^-.* requires a value",
     "correct the options in the DSN, or PGOPTIONS"),
    (None, r"certificate verify failed", "name the authority that signed the server's certificate, with sslrootcert in "
     "the DSN or, for sslrootcert=system, with SSL_CERT_FILE"),
    (None, r"does not match host name", "let host in the DSN be a name of the certificate; hostaddr may be any"),
    (None, r"root certificate|private key|(certificate|key|crl) file|revocation list|host name (must be|from)|"
     r"SSL value|server does not support (SSL|GSSAPI)|GSSAPI encryption required|SSL error: (?!unexpected eof)|"
     r"weak sslmode|channel binding required|authentication method|^invalid |^could not match|is too long|^bad value|"
     r"definition of service|service file|local user|no password supplied",
     "correct the DSN, or the file that it names"),
)  # fmt: skip
"""SQLSTATE or its class, a pattern of the message, and the fix of what waiting does not mend; the first that fits.

libpq gives no SQLSTATE if it cannot connect, only its own words or the server's message: it is None here."""
TRANSIENT: Final = ("08", "25", "40", "53", "55", "57", "58", "XX")
"""Errors that pass without a fix: connection, transaction state and rollback, resources, object state, operator,
system, internal."""
LOST: Final = ("08", "57P", "25P03", "25P04", "25006")
"""The session has ended or is of no use: connection exceptions, a server that stops, a session that was idle or a
transaction that ran for too long, a server that has become a standby."""
QUOTING: Final = ("21", "22", "23")
"""Errors of one statement on a connection that still works: cardinality, values, constraints. They quote values."""
SERVER_MESSAGE: Final = re.compile(r"^(?:FATAL|ERROR|PANIC): +(.+)")
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


def explain(error: psycopg.Error | TimeoutError, dsn: str | None = None, statement: str | None = None) -> RelayError:
    """Return ``DatabaseUnavailable`` for an error that passes, ``DatabaseUnusable`` for one that needs a fix.

    Return ``IncarnationChanged`` if another server than the caller's refused the statement. ``dsn`` is the connection
    string of a connection that was not made, whose secrets are replaced in libpq's text.

    Of an answer of the server only the primary message and the SQLSTATE are passed on: its details may contain rows.
    """
    if isinstance(error, TimeoutError):
        name = f": statement {statement}" if statement else ""
        return DatabaseUnavailable(f"the database did not answer in time{name}")
    if error.sqlstate:
        return _answered(error.sqlstate, error.diag.message_primary or "")
    if isinstance(error, psycopg.OperationalError):
        return _not_connected(error, dsn)
    if isinstance(error, psycopg.ProgrammingError) and not UNSENT.search(str(error)):
        if dsn is None or fault(dsn):
            return DatabaseUnusable(f"the DSN is not a connection string: {ENCODE}")
        return DatabaseUnusable(f"the DSN cannot be used: {redacted(str(error), dsn)}")
    return DatabaseUnavailable(f"the database could not be asked ({type(error).__name__})")


def is_starved(error: Exception) -> bool:
    """Return True if this process had no memory for the answer, for which libpq has ended the connection itself."""
    return isinstance(error, psycopg.Error) and not error.sqlstate and NO_MEMORY.search(str(error)) is not None


def explain_statement(error: Exception, name: str) -> RelayError:
    """Return the error for a failure of the statement ``name`` that says nothing about the server.

    Return ``StatementFailed`` if only the statement or its answer failed: it timed out, met a lock or a deadlock, needs
    too much memory, or has a value that cannot be loaded. Otherwise as ``explain``.
    """
    if is_starved(error):
        return StatementFailed(f"the answer of statement {name} is too large for the memory there is", "53200")
    if not isinstance(error, psycopg.Error) or not error.sqlstate:
        return StatementFailed(f"statement {name} failed, or its answer cannot be loaded ({type(error).__name__})")
    state, said = error.sqlstate, error.diag.message_primary or ""
    explained = _answered(state, said)
    ended = state.startswith(LOST) or error.diag.severity_nonlocalized in ("FATAL", "PANIC")
    if ended or isinstance(explained, IncarnationChanged):
        return explained
    if isinstance(explained, DatabaseUnavailable) or state.startswith(QUOTING):
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
            refused = _answered("42501", said)
            mends = f"run outbox-relay migrate --grant-{grant} ROLE"
            return RightMissing(refused.said, mends) if isinstance(refused, RightMissing) else refused
        case _:
            return None


@contextmanager
def advise_grant(kind: str) -> Generator[None]:
    """Name the grant of this kind in the error that the block raises if the role has no right to something."""
    try:
        yield
    except RightMissing as error:
        if error.advice != GRANT:  # it names one grant already
            raise
        fix = f"run outbox-relay migrate --grant-{kind} ROLE as the owner of the schema"
        raise RightMissing(error.said, fix) from None


def _answered(state: str, said: str) -> RelayError:
    if state == ANOTHER_SERVER:
        return IncarnationChanged(said)
    if fix := _fix(state, said):
        refusal = f"the database says: {said} ({state})"
        return RightMissing(refusal, fix) if fix == GRANT else DatabaseUnusable(f"{refusal}: {fix}")
    if state.startswith(TRANSIENT):
        return DatabaseUnavailable(f"the database says: {said} ({state})")
    return DatabaseUnusable(
        f"the database refused a statement ({state})" + ("" if state.startswith(QUOTING) else f": {said}")
    )


def _fix(state: str | None, said: str) -> str | None:
    """Return the fix for what waiting does not mend, or None. ``state`` is None for what libpq says."""
    fitting = (
        fix
        for known, message, fix in FIXES
        if (known is None if state is None else known is not None and state.startswith(known))
        and re.search(message, said)
    )
    return next(fitting, None)


def _not_connected(error: psycopg.OperationalError, dsn: str | None) -> RelayError:
    if dsn is not None and (wrong := fault(dsn)):  # a part of the password may have been taken for a host
        return DatabaseUnusable(f"the DSN cannot be used: {wrong}")
    where = _where(error)
    if error.pgconn is not None and error.pgconn.needs_password:
        return DatabaseUnusable(f"the database{where} requires a password, and the DSN contains none: {LOGIN}")
    text = str(error) if dsn is not None else UNCHECKED.sub("host", str(error))
    attempts = list(dict.fromkeys(_attempts(text, where)))
    reasons = list(chain.from_iterable(reasons for _, reasons in attempts))
    connecting = dsn is not None or error.pgconn is not None
    # A host that may come back is waited for. With sslmode=prefer the attempt without TLS comes last.
    fixes = [_fix(None, SERVER_MESSAGE.sub(r"\1", reasons[-1])) for _, reasons in attempts if reasons and connecting]
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


def _where(error: psycopg.OperationalError) -> str:
    if error.pgconn is None:
        return ""
    try:
        host, port = error.pgconn.host.decode(), error.pgconn.port.decode()
    except (psycopg.Error, UnicodeDecodeError):
        return ""
    return f" at {host}:{port}" if host else ""
