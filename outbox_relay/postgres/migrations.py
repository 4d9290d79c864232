"""The schema's versions: which this package has, which the database has, and the way from one to the other.

A migration is a file ``NNNN_name.sql`` in ``schema/``. All that are missing are applied in one transaction under a
lock of ``outbox.meta``, so that a database has the schema of one version or of the other. The first lines of a
migration may say ``-- min_relay: N``: relays made for a schema older than N cannot work on it. Without that they can.

``debezium.sql`` is no migration: functions for whoever comes from Debezium, made anew whenever they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, RelayError
from outbox_relay.postgres.errors import encoding_fault, explain

LOCK_SECONDS: Final = 5
"""Longest wait for each lock that a migration needs."""
CONNECT_SECONDS: Final = 10
TRIES: Final = 3
"""Attempts to apply what is missing, beside sessions that create the schema too or lock its tables in another order."""
PAYLOAD_LEAST, PAYLOAD_MOST = 1 << 10, 64 << 20
"""Bounds of the ceiling of payloads, in bytes."""

DEBEZIUM: Final = "debezium.sql"
"""The file of the functions that adopt an outbox table of Debezium's."""

_FILE = re.compile(r"(\d{4})_\w+\.sql")
_MIN_RELAY = re.compile(r"^-- min_relay: (\d+)$", re.MULTILINE)
_PACKAGE = Path(__file__).parent.parent
_INSTALLED = _PACKAGE / "schema"
SCHEMA_FOLDER: Final = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "schema"
"""Inside the package where that was installed from a wheel, beside it in a checkout."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema: its version, its name, the oldest schema whose relays still work, and its SQL."""

    version: int
    name: str
    min_relay: int
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ``migrate`` found and did. Version 0 is a database without the schema."""

    before: int
    after: int
    applied: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()
    debezium: bool = False
    notes: tuple[str, ...] = ()
    max_payload_bytes: int | None = None

    def __str__(self) -> str:
        """A line for people, and one for each note."""
        grants = "; granted " + ", ".join(self.granted) if self.granted else ""
        debezium = "; outbox.adopt_debezium is there" if self.debezium else ""
        ceiling = "" if self.max_payload_bytes is None else f"; payloads of at most {self.max_payload_bytes} bytes"
        return "\n".join((self._happened() + grants + ceiling + debezium, *self.notes))

    def _happened(self) -> str:
        steps = ", ".join(self.applied)
        if self.before > SCHEMA_VERSION and not steps:
            return (
                f"schema outbox has version {self.before}, newer than this outbox-relay's {SCHEMA_VERSION}, "
                "which works on it: nothing was changed"
            )
        if not steps:
            done = self.granted or self.debezium or self.max_payload_bytes
            return f"schema outbox has version {self.after}" + ("" if done else ": nothing to do")
        if self.before == 0:
            return f"schema outbox was created with version {self.after} ({steps})"
        return f"schema outbox was brought from version {self.before} to {self.after} ({steps})"


def migrations(folder: Path) -> tuple[Migration, ...]:
    """The migrations in a folder, in order. Raises ``DatabaseUnusable`` when one is missing in the row."""
    found: list[Migration] = []
    for path in sorted(path for path in folder.glob("*.sql") if _FILE.fullmatch(path.name)):
        text = path.read_text(encoding="utf-8")
        said = _MIN_RELAY.search(text)
        least = int(said[1]) if said else found[-1].min_relay if found else 1
        found.append(Migration(int(path.name[:4]), path.stem, least, text))
    if [step.version for step in found] != list(range(1, len(found) + 1)) or not found:
        raise DatabaseUnusable(f"{folder} does not have every migration from 0001 on: install outbox-relay again")
    return tuple(found)


SCHEMA_VERSION: Final = migrations(SCHEMA_FOLDER)[-1].version
"""The newest schema that this package knows, and the one that its relay is made for."""


def fit(schema_version: int | None, min_relay: int | None, *, ours: int = SCHEMA_VERSION) -> str | None:
    """Why a relay made for schema ``ours`` cannot work on this one (None: no schema); nothing if it can."""
    if not schema_version:
        return "schema outbox is missing: run outbox-relay migrate"
    if schema_version < ours:
        return f"schema outbox has version {schema_version} and this relay needs {ours}: run outbox-relay migrate"
    if min_relay is not None and min_relay > ours:
        return (
            f"schema outbox has version {schema_version}, which needs relays made for version {min_relay} or newer; "
            f"this one is made for {ours}: install a newer outbox-relay"
        )
    return None


def migrate(
    dsn: str,
    *,
    grant_emit: Iterable[str] = (),
    grant_relay: Iterable[str] = (),
    debezium: bool = False,
    max_payload_bytes: int | None = None,
    folder: Path = SCHEMA_FOLDER,
) -> Outcome:
    """Create the schema or bring it to the newest version in ``folder``, and grant roles what they need.

    With ``debezium`` the functions that adopt an outbox table of Debezium's are made or replaced, and
    ``max_payload_bytes`` becomes the ceiling of payloads. All in one transaction, and nothing at all on a schema that
    is newer. Roles that were granted before keep what they need; what any other role holds in the schema is taken back,
    and named in the notes. Raises ``DatabaseUnusable`` for what must be mended first, rights, roles and the database's
    encoding among them, and ``DatabaseUnavailable`` when the database cannot be asked or a lock is held for too long.
    """
    wanted = _Wanted(tuple(_grants(grant_emit, grant_relay)), debezium, _checked(max_payload_bytes))
    steps = migrations(folder)
    notes: list[str] = []
    try:
        with _connect(dsn) as connection:
            if problem := encoding_fault(connection.info):
                raise DatabaseUnusable(problem)
            connection.add_notice_handler(lambda notice: _note(notice, notes))
            try:
                return _in_turn(connection, steps, wanted, folder, notes)
            except errors.LockNotAvailable:
                raise DatabaseUnavailable(_locked(connection)) from None
    except psycopg.Error as error:
        raise _explain(error) from None


def script(
    grant_emit: Iterable[str] = (),
    grant_relay: Iterable[str] = (),
    *,
    debezium: bool = False,
    max_payload_bytes: int | None = None,
    have: int = 0,
    folder: Path = SCHEMA_FOLDER,
) -> str:
    """The SQL that ``migrate`` runs on a schema of version ``have``, for whoever applies it with other tools.

    It is to be run whole, in one transaction, by the role that will own the schema.
    """
    steps = [step for step in migrations(folder) if step.version > have]
    grants = _grants(grant_emit, grant_relay)
    return "\n".join(
        (
            f"-- Schema outbox, from version {have} to {steps[-1].version if steps else have}.",
            "-- To be run in one transaction: psql -1 -v ON_ERROR_STOP=1 -f FILE, or a tool that does the same.",
            _BEFORE,
            *(_step(step) for step in steps),
            *(_record(kind, role) for kind, role in grants),
            *(_ceiling(most) for most in (_checked(max_payload_bytes),) if most is not None),
            *((folder / name).read_text(encoding="utf-8") for name in (DEBEZIUM,) if debezium),
            (folder / "grants.sql").read_text(encoding="utf-8"),
            _AFTER,
        )
    )


# -- the text -----------------------------------------------------------------------------------------------------

# Names of functions and operators in a migration mean those of the system, whatever others may lie in the caller's
# search_path; it is given back for whatever comes after in the same transaction. The lock is of a table, since an
# advisory lock could be held by any role of the database; sinks come before it, as wherever both are changed. Before
# there is a table, sessions wait for each other in CREATE SCHEMA.
_BEFORE: Final = f"""
do $$
begin
    perform set_config('outbox.search_path_before', current_setting('search_path'), true);
    perform set_config('search_path', 'pg_catalog, pg_temp', true);
    perform set_config('lock_timeout', '{LOCK_SECONDS}s', true);
    if getdatabaseencoding() <> 'UTF8' then
        raise exception 'this database has the encoding %, and schema outbox needs UTF8', getdatabaseencoding();
    end if;
    if to_regclass('outbox.meta') is not null then
        lock table outbox.sink, outbox.meta in share row exclusive mode;
    end if;
end
$$;
"""

_AFTER: Final = """
do $$
begin
    perform set_config('search_path', current_setting('outbox.search_path_before'), true);
end
$$;
"""

_GUARD: Final = """
do $$
declare
    have integer := 0;
begin
    if to_regclass('outbox.meta') is not null then
        have := (select m.schema_version from outbox.meta m);
    end if;
    if have <> {before} then
        raise exception 'schema outbox has version %, and this step goes from {before} to {after}', have
            using hint = 'Nothing was changed. Print the script for this version, or run outbox-relay migrate.';
    end if;
end
$$;
"""


def _step(step: Migration) -> str:
    guard = _GUARD.format(before=step.version - 1, after=step.version)
    done = f"update outbox.meta set schema_version = {step.version}, min_relay = {step.min_relay};\n"  # noqa: S608 - two numbers
    return f"-- {step.name}\n{guard}\n{step.text}\n{done}"


def _grants(emit: Iterable[str], relay: Iterable[str]) -> list[tuple[str, str]]:
    return [*(("emit", role) for role in dict.fromkeys(emit)), *(("relay", role) for role in dict.fromkeys(relay))]


def _record(kind: str, role: str) -> str:
    """A statement that records a grant; it fails with SQLSTATE 42704 when there is no such role."""
    name = sql.Literal(sql.Identifier(role).as_string()).as_string()
    return (
        f"insert into outbox.grantee (role_name, kind) select r.rolname, '{kind}' from pg_roles r "  # noqa: S608 - quoted
        f"where r.oid = {name}::regrole on conflict do nothing;\n"
    )


def _checked(max_payload_bytes: int | None) -> int | None:
    if max_payload_bytes is not None and not PAYLOAD_LEAST <= max_payload_bytes <= PAYLOAD_MOST:
        raise DatabaseUnusable(
            f"the ceiling of payloads must be {PAYLOAD_LEAST} to {PAYLOAD_MOST} bytes: {max_payload_bytes}"
        )
    return max_payload_bytes


def _ceiling(most: int) -> str:
    return (
        "create or replace function outbox.payload_ceiling() returns integer "
        f"language sql stable parallel safe return {most};\n"
    )


def rebase(dsn: str) -> int:
    """Make a log whose numbers are another server's relayable again (``outbox.rebase``); returns the floor.

    For after a restore, or a move to another cluster. Raises ``DatabaseUnusable`` while relays run, and as ``migrate``
    does.
    """
    try:
        with _connect(dsn) as connection, connection.transaction():
            connection.execute("set transaction isolation level read committed")
            connection.execute("set local lock_timeout = '30s'")
            rows = connection.execute("select outbox.rebase()").fetchall()
            return rows[0][0]
    except errors.LockNotAvailable:
        raise DatabaseUnavailable("applications or relays use the log: stop them, then rebase") from None
    except errors.ObjectInUse as error:
        raise DatabaseUnusable(f"{error.diag.message_primary}. {error.diag.message_hint}") from None
    except psycopg.Error as error:
        raise _explain(error) from None


# -- applying it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is asked for beside the schema itself: roles by kind, Debezium's functions, the ceiling of payloads."""

    grants: tuple[tuple[str, str], ...]
    debezium: bool
    max_payload_bytes: int | None


def _connect(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    wanted: dict[str, Any] = {"application_name": "outbox-relay migrate", "connect_timeout": CONNECT_SECONDS}
    for name in conninfo_to_dict(dsn):
        wanted.pop(name, None)
    connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None, row_factory=tuple_row, **wanted)
    # Under a snapshot from before a lock was granted, the version of the schema would be an old one.
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    connection.read_only = False
    connection.deferrable = False
    return connection


_SESSION: Final = """
select set_config(name, value, true)
  from (values ('client_min_messages', 'notice'), ('standard_conforming_strings', 'on'), ('TimeZone', 'UTC'),
               ('DateStyle', 'ISO'), ('default_tablespace', ''), ('default_table_access_method', 'heap'))
       settings (name, value)
"""
"""Settings that decide what a migration makes, or whether its notices arrive, whatever the defaults are."""


def _in_turn(
    connection: psycopg.Connection[tuple[Any, ...]],
    steps: Sequence[Migration],
    wanted: _Wanted,
    folder: Path,
    notes: list[str],
) -> Outcome:
    """Apply what is wanted, again after a deadlock or beside other sessions that create the schema."""
    for attempt in range(1, TRIES + 1):
        notes.clear()
        try:
            with connection.transaction():
                return _apply(connection, steps, wanted, folder, notes)
        except (errors.UniqueViolation, errors.DuplicateSchema, errors.DeadlockDetected):
            if attempt == TRIES:
                raise
    raise AssertionError("unreachable")


def _apply(
    connection: psycopg.Connection[tuple[Any, ...]],
    steps: Sequence[Migration],
    wanted: _Wanted,
    folder: Path,
    notes: list[str],
) -> Outcome:
    connection.execute(_SESSION.encode())
    connection.execute(_BEFORE.encode())
    before, min_relay = _found(connection)
    newest = steps[-1].version
    if before > newest:
        if problem := fit(before, min_relay, ours=newest):
            raise DatabaseUnusable(problem)
        return Outcome(before, before, notes=_left_out(wanted))
    missing = [step for step in steps if step.version > before]
    for step in missing:
        connection.execute(_step(step).encode())
    for kind, role in wanted.grants:
        _recorded(connection, kind, role)
    if wanted.max_payload_bytes is not None:
        connection.execute(_ceiling(wanted.max_payload_bytes).encode())
    if wanted.debezium:
        connection.execute((folder / DEBEZIUM).read_bytes())
    connection.execute((folder / "grants.sql").read_bytes())
    recorded = connection.execute(
        "select kind, role_name::text from outbox.grantee order by kind, role_name"
    ).fetchall()
    granted = tuple(f"{kind} to {role}" for kind, role in recorded if missing or (kind, role) in wanted.grants)
    applied = tuple(step.name for step in missing)
    return Outcome(before, newest, applied, granted, wanted.debezium, tuple(notes), wanted.max_payload_bytes)


def _left_out(wanted: _Wanted) -> tuple[str, ...]:
    """Return what cannot be done on a schema that is newer, a line each."""
    lost = [f"not granted, which needs the newer outbox-relay: {kind} to {role}" for kind, role in wanted.grants]
    if wanted.max_payload_bytes is not None:
        lost.append("not set, which needs the newer outbox-relay: the ceiling of payloads")
    if wanted.debezium:
        lost.append("not made, which needs the newer outbox-relay: outbox.adopt_debezium")
    return tuple(lost)


def _found(connection: psycopg.Connection[tuple[Any, ...]]) -> tuple[int, int]:
    """The schema's version and its oldest relay; 0 and 0 without one.

    Raises ``DatabaseUnusable`` if there is a schema outbox that is not ours.
    """
    exists, ours = connection.execute(
        "select to_regnamespace('outbox') is not null, to_regclass('outbox.meta') is not null"
    ).fetchone() or (False, False)
    if not exists:
        return 0, 0
    if not ours:
        raise DatabaseUnusable(
            "there is a schema outbox in this database that is not outbox-relay's: rename it or drop it"
        )
    row = connection.execute("select schema_version, min_relay from outbox.meta").fetchone()
    return row or (0, 0)


def _recorded(connection: psycopg.Connection[tuple[Any, ...]], kind: str, role: str) -> None:
    try:
        connection.execute(_record(kind, role).encode())
    except errors.UndefinedObject:
        raise DatabaseUnusable(f'role "{role}" does not exist: create it first; nothing was changed') from None


def _note(notice: errors.Diagnostic, notes: list[str]) -> None:
    if notice.severity_nonlocalized == "NOTICE" and notice.message_primary:
        notes.append(notice.message_primary)


def _explain(error: psycopg.Error) -> RelayError:
    if error.sqlstate == errors.InsufficientPrivilege.sqlstate:
        return DatabaseUnusable(
            f"the database says: {error.diag.message_primary} ({error.sqlstate}): run migrate as the owner of schema "
            "outbox or, to create it, as a role that may create schemas in this database, its owner for example"
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
    """What to say when a lock was not to be had: who may be holding it."""
    rows = connection.execute(_HOLDERS).fetchall()
    who = "; ".join(
        f"process {pid} (user {user}, application {application or 'unnamed'}, {state or 'state unknown'}"
        + ("" if seconds is None else f", in a transaction for {seconds} s")
        + ")"
        for pid, user, application, state, seconds in rows
    )
    return (
        f"a lock that migrate needs was held by somebody else for {LOCK_SECONDS} s; nothing was changed. Holding locks "
        f"on the schema now: {who or 'nobody any more'}. Run migrate again when they have ended"
    )
