"""Applying the schema to a database: create, upgrade, grant, rebase.

Everything that is missing is applied in one transaction under a lock on ``outbox.meta``, so that a database has the
schema of exactly one version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Unpack

import psycopg
from psycopg import errors
from psycopg.rows import tuple_row

from outbox_relay.domain.errors import ConfigurationError, DatabaseUnavailable, DatabaseUnusable, RelayError
from outbox_relay.postgres.dsn import find_authorities, parsed
from outbox_relay.postgres.errors import encoding_fault, explain
from outbox_relay.postgres.schema import (
    LOCK_SECONDS,
    PROLOGUE,
    SCHEMA_FOLDER,
    SCHEMA_VERSION,
    Options,
    SchemaOptions,
    fit,
    migrations,
    newest_version,
    options_sql,
    schema_options,
    upgrade_sql,
)
from outbox_relay.postgres.session_settings import CORRECTION

CONNECT_SECONDS: Final = 10
ATTEMPTS: Final = 3
"""Attempts to apply what is missing while other sessions create the schema or lock its tables in another order."""


LEFT_OUT: Final = "its options were not applied, which needs the newer outbox-relay"


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """The result of ``migrate``. Version 0 is a database without the schema."""

    before: int
    after: int
    applied: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()
    debezium: bool = False
    notes: tuple[str, ...] = ()
    max_payload_bytes: int | None = None

    def __str__(self) -> str:
        """Return a line for people, and one for each note."""
        grants = "; granted " + ", ".join(self.granted) if self.granted else ""
        debezium = "; outbox.adopt_debezium is there" if self.debezium else ""
        ceiling = "" if self.max_payload_bytes is None else f"; payloads of at most {self.max_payload_bytes} bytes"
        return "\n".join((self._happened() + grants + ceiling + debezium, *self.notes))

    def _happened(self) -> str:
        if self.before > SCHEMA_VERSION:
            return (
                f"schema outbox has version {self.before}, newer than this outbox-relay's {SCHEMA_VERSION}, "
                "which works on it: nothing was changed"
            )
        if self.before == self.after:
            done = self.granted or self.debezium or self.max_payload_bytes
            return f"schema outbox has version {self.after}" + ("" if done else ": nothing to do")
        if self.before == 0:
            return f"schema outbox was created with version {self.after}"
        return f"schema outbox was brought from version {self.before} to {self.after} ({', '.join(self.applied)})"


def migrate(dsn: str, *, folder: Path = SCHEMA_FOLDER, **given: Unpack[Options]) -> MigrationResult:
    """Create the schema or upgrade it to the newest version in ``folder``, and grant roles what they need.

    All of it happens in one transaction, and none of it on a newer schema. Roles that were granted before keep what
    they need. Other privileges in the schema are named in the notes.

    Raises ``DatabaseUnusable`` for problems to fix first, such as missing rights or roles or the database's encoding.
    Raises ``DatabaseUnavailable`` if the database does not answer or a lock is held for too long.
    """
    options = schema_options(**given)
    try:
        with _connect(dsn) as connection:
            if problem := encoding_fault(connection.info):
                raise DatabaseUnusable(problem)
            run = _Run(connection, options, folder)
            connection.add_notice_handler(run.note)
            try:
                return run.apply()
            except errors.LockNotAvailable:
                raise DatabaseUnavailable(_locked(connection)) from None
    except psycopg.Error as error:
        raise _explain(error) from None


def rebase(dsn: str, actor: str | None = None, reason: str | None = None) -> int:
    """Make a log with the numbers of another server relayable again (``outbox.rebase``); return the floor.

    Use it after a restore, or a move to another cluster. ``actor`` and ``reason`` are recorded in the audit.

    Raises ``DatabaseUnusable`` while relays run, ``ConfigurationError`` for a reason that is too long, and as
    ``migrate`` does.
    """
    try:
        with _connect(dsn) as connection, connection.transaction():
            connection.execute("set transaction isolation level read committed")
            connection.execute("set local lock_timeout = '30s'")
            rows = connection.execute("select outbox.rebase(%s, %s)", (actor, reason)).fetchall()
            return rows[0][0]
    except errors.LockNotAvailable:
        raise DatabaseUnavailable("applications or relays use the log: stop them, then rebase") from None
    except errors.InvalidParameterValue as error:
        raise ConfigurationError(str(error.diag.message_primary)) from None
    except errors.ObjectInUse as error:
        raise DatabaseUnusable(f"{error.diag.message_primary}. {error.diag.message_hint}") from None
    except psycopg.Error as error:
        raise _explain(error) from None


def _connect(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    defaults: dict[str, Any] = {"application_name": "outbox-relay migrate", "connect_timeout": CONNECT_SECONDS}
    for name in parsed(dsn):
        defaults.pop(name, None)
    find_authorities(dsn)
    try:
        connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None, row_factory=tuple_row, **defaults)
    except psycopg.Error as error:
        raise explain(error, dsn) from None
    # A snapshot from before a lock was granted would show an old version of the schema.
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    connection.read_only = False
    connection.deferrable = False
    connection.execute(CORRECTION)
    return connection


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of ``migrate`` on a connection."""

    connection: psycopg.Connection[tuple[Any, ...]]
    options: SchemaOptions
    folder: Path
    notes: list[str] = field(default_factory=list[str])

    def note(self, notice: errors.Diagnostic) -> None:
        """Keep a notice of the server for the outcome."""
        if notice.severity_nonlocalized == "NOTICE" and notice.message_primary:
            self.notes.append(notice.message_primary)

    def apply(self) -> MigrationResult:
        """Apply what is missing, again after a deadlock or while other sessions create the schema."""
        for attempt in range(1, ATTEMPTS + 1):
            self.notes.clear()
            try:
                with self.connection.transaction():
                    return self._apply_once()
            except (errors.UniqueViolation, errors.DuplicateSchema, errors.DeadlockDetected):
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _apply_once(self) -> MigrationResult:
        self.connection.execute("set local client_min_messages = notice")
        self.connection.execute("set local standard_conforming_strings = on")  # counts for what is sent after it
        self.connection.execute(PROLOGUE.encode())
        before, min_relay = self._found()
        newest = newest_version(self.folder)
        if before > newest:
            if problem := fit(before, min_relay, ours=newest):
                raise DatabaseUnusable(problem)
            left_out = self.options != SchemaOptions()
            return MigrationResult(before, before, notes=(LEFT_OUT,) if left_out else ())
        for statements in (*upgrade_sql(before, self.folder), *options_sql(self.options, self.folder)):
            self.connection.execute(statements.encode())
        applied = tuple(step.name for step in migrations(self.folder) if step.version > before > 0)
        granted = self._granted(all_of_them=before < newest)
        debezium, max_payload_bytes = self.options.debezium, self.options.max_payload_bytes
        return MigrationResult(before, newest, applied, granted, debezium, tuple(self.notes), max_payload_bytes)

    def _found(self) -> tuple[int, int]:
        """Return the version of the schema and of its oldest relay, (0, 0) without a schema.

        Raises ``DatabaseUnusable`` if another program's schema has the name outbox.
        """
        exists, ours = self.connection.execute(
            "select to_regnamespace('outbox') is not null, to_regclass('outbox.meta') is not null"
        ).fetchone() or (False, False)
        if not exists:
            return 0, 0
        if not ours:
            raise DatabaseUnusable(
                "there is a schema outbox in this database that is not outbox-relay's: rename it or drop it"
            )
        row = self.connection.execute("select schema_version, min_relay from outbox.meta").fetchone()
        return row or (0, 0)

    def _granted(self, *, all_of_them: bool) -> tuple[str, ...]:
        recorded = self.connection.execute(
            "select kind, role_name::text from outbox.grantee order by kind, role_name"
        ).fetchall()
        wanted = self.options.grants
        return tuple(f"{kind} to {role}" for kind, role in recorded if all_of_them or (kind, role) in wanted)


def _explain(error: psycopg.Error) -> RelayError:
    if error.sqlstate == errors.UndefinedObject.sqlstate:
        return DatabaseUnusable(f"{error.diag.message_primary}: create it first; nothing was changed")
    if error.sqlstate == errors.InsufficientPrivilege.sqlstate:
        return DatabaseUnusable(
            f"the database says: {error.diag.message_primary} ({error.sqlstate}): run migrate as the owner of schema "
            "outbox or, to create it, as a role that may create schemas in this database, its owner for example"
        )
    if error.sqlstate == errors.DependentObjectsStillExist.sqlstate:
        return DatabaseUnusable(
            f"the database says: {error.diag.message_primary} ({error.sqlstate}): {error.diag.message_detail}. "
            "Drop them, run migrate, and create them again; nothing was changed"
        )
    return explain(error)


_HOLDERS: Final = """
select distinct a.pid, a.usename::text, a.application_name, a.state,
       extract(epoch from clock_timestamp() - a.xact_start)::integer
  from pg_locks l join pg_stat_activity a on a.pid = l.pid
 where l.granted and l.pid <> pg_backend_pid()
   and l.database = (select d.oid from pg_database d where d.datname = current_database())
   and l.locktype = 'relation'
   and (l.relation in (select c.oid from pg_class c where c.relnamespace = to_regnamespace('outbox'))
        or (to_regnamespace('outbox') is null and l.relation = 'pg_namespace'::regclass
            and l.mode = 'RowExclusiveLock'))
 order by 1
 limit 5
"""


def _locked(connection: psycopg.Connection[tuple[Any, ...]]) -> str:
    """Return the error message for a lock that was not granted, with the sessions that may hold it."""
    rows = connection.execute(_HOLDERS).fetchall()
    holders = "; ".join(
        f"process {pid} (user {user}, application {application or 'unnamed'}, {state or 'state unknown'}"
        + ("" if seconds is None else f", in a transaction for {seconds} s")
        + ")"
        for pid, user, application, state, seconds in rows
    )
    return (
        f"a lock that migrate needs was held by another session for {LOCK_SECONDS} s; nothing was changed. Sessions "
        f"that hold locks on the schema now: {holders or 'none'}. Run migrate again when they have ended"
    )
