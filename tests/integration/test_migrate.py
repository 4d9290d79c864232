"""The schema's versions: created, brought forward, met by two at once, newer than ours, printed, clearly refused."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from outbox_relay import outbox
from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, RelayError, RightMissing
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Verdict
from outbox_relay.postgres.errors import explain
from outbox_relay.postgres.migrations import MigrationResult, migrate
from outbox_relay.postgres.schema import BASELINE, SCHEMA_VERSION, script
from tests.support.database import Database, query
from tests.support.memory_sink import MemorySink
from tests.support.postgres import PostgresServer
from tests.support.relay_harness import running, spec
from tests.support.roles import new_role
from tests.support.schemas import add_migration, meta, next_schema
from tests.support.wait import until

NEXT = SCHEMA_VERSION + 1


def _answers(dsn: str) -> bool:
    psycopg.connect(dsn).close()
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the schema of a possible next release, which suits old relays."""
    return next_schema(tmp_path / "schema")


def works(database: Database) -> None:
    """Emit an event."""
    with database.connect() as conn:
        outbox.emit(conn, "t", 1)


# -- creating and bringing forward --------------------------------------------------------------------------------


def test_from_nothing_and_again(empty_database: Database) -> None:
    first = migrate(empty_database.dsn)
    assert first == MigrationResult(0, SCHEMA_VERSION)
    assert str(first) == f"schema outbox was created with version {SCHEMA_VERSION}"
    assert meta(empty_database) == (SCHEMA_VERSION, BASELINE)
    works(empty_database)
    again = migrate(empty_database.dsn)
    assert again == MigrationResult(SCHEMA_VERSION, SCHEMA_VERSION)
    assert str(again) == f"schema outbox has version {SCHEMA_VERSION}: nothing to do"


def test_forward(database: Database, folder: Path) -> None:
    add_migration(folder, f"-- min_relay: {NEXT}\nalter table outbox.meta add column extra integer;\n")
    found = migrate(database.dsn, folder=folder)
    names = (f"{NEXT:04}_extra", f"{NEXT + 1:04}_extra")
    assert found == MigrationResult(SCHEMA_VERSION, NEXT + 1, names)
    assert str(found) == f"schema outbox was brought from version {SCHEMA_VERSION} to {NEXT + 1} ({', '.join(names)})"
    assert meta(database) == (NEXT + 1, NEXT)


def test_a_migration_that_fails_changes_nothing(database: Database, folder: Path) -> None:
    add_migration(folder, "create table outbox.half (); select 1 / 0;\n")
    with pytest.raises(DatabaseUnusable, match="22012"):
        migrate(database.dsn, folder=folder)
    assert meta(database) == (SCHEMA_VERSION, BASELINE)
    with database.connect() as conn:
        assert conn.execute(
            "select to_regclass('outbox.half')::text, to_regproc('outbox_internal.extra')::text"
        ).fetchone() == (
            None,
            None,
        )


def test_the_second_waits_for_the_first(empty_database: Database) -> None:
    found: list[MigrationResult] = []
    waiting = "select 1 from pg_stat_activity where application_name like '% migrate' and wait_event_type = 'Lock'"
    with empty_database.connect() as first, empty_database.connect(autocommit=True) as watcher:
        first.execute(script().encode())
        second = threading.Thread(target=lambda: found.append(migrate(empty_database.dsn)))
        second.start()
        until(lambda: watcher.execute(waiting).fetchone(), seconds=20, what="the second migrate waits")
        first.commit()
        second.join(timeout=20)
    assert found == [MigrationResult(SCHEMA_VERSION, SCHEMA_VERSION)]


# -- newer and older ----------------------------------------------------------------------------------------------


def test_what_is_no_longer_defined_is_dropped(database: Database, folder: Path) -> None:
    migrate(database.dsn, folder=folder)
    (folder / "functions" / "extra.sql").unlink()
    add_migration(folder, "select 1;\n")
    there = "select to_regproc('outbox_internal.extra') is not null, to_regproc('outbox.emit') is not null"
    assert query(database, there) == [(True, True)]
    migrate(database.dsn, folder=folder)
    assert query(database, there) == [(False, True)]


def test_a_schema_that_was_never_released_is_refused(database: Database) -> None:
    query(database, "update outbox.meta set schema_version = 33")
    with pytest.raises(DatabaseUnusable, match="version 33, which was never released: drop it, and run migrate"):
        migrate(database.dsn)
    with pytest.raises(DatabaseUnusable, match="never released"):
        script(have=33)


def test_a_newer_schema_that_we_can_work_on(database: Database, folder: Path) -> None:
    migrate(database.dsn, folder=folder)
    assert meta(database) == (NEXT, BASELINE)
    found = migrate(database.dsn, grant_emit=["postgres"])
    assert found == MigrationResult(
        NEXT, NEXT, notes=("its options were not applied, which needs the newer outbox-relay",)
    )
    assert str(found).startswith(
        f"schema outbox has version {NEXT}, newer than this outbox-relay's {SCHEMA_VERSION}, which works on it: nothing"
    )
    assert meta(database) == (NEXT, BASELINE)
    works(database)


def test_a_newer_schema_that_we_cannot_work_on(database: Database, folder: Path) -> None:
    add_migration(folder, f"-- min_relay: {NEXT}\nselect 1;\n")
    migrate(database.dsn, folder=folder)
    with pytest.raises(
        DatabaseUnusable, match=f"has version {NEXT + 1}, which needs relays made for version {NEXT} or newer"
    ):
        migrate(database.dsn)


def test_a_relay_works_on_the_schema_of_the_next_version(database: Database, folder: Path) -> None:
    migrate(database.dsn, folder=folder)
    assert meta(database) == (NEXT, BASELINE)
    with database.connect() as conn:
        uid = str(outbox.emit(conn, "t", 1))
    sink = MemorySink()

    def delivered() -> bool:
        return uid in [event.uid for event in sink.delivered]

    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        until(delivered, seconds=30, what="the event is delivered")


def test_an_upgrade_beside_a_relay_and_emits_loses_and_repeats_nothing(database: Database, folder: Path) -> None:
    """Events of 20 keys, some of which fail at first and wait in outbox.delivery, while tables and functions change."""
    uids: list[str] = []
    done = threading.Event()

    def emits() -> None:
        with database.connect() as conn:
            while not done.is_set():
                uid = outbox.emit(conn, "t", len(uids), key=f"k{len(uids) % 20}")
                conn.commit()
                uids.append(str(uid))

    def emitted(count: int) -> None:
        until(lambda: len(uids) >= count, seconds=60, what=f"{count} events are emitted")

    def fails_at_first(event: StoredEvent, attempt: int) -> Verdict:
        return Failed("not yet") if attempt == 1 and int(event.payload) % 37 == 0 else DELIVERED

    sink = MemorySink(fails_at_first)
    emitter = threading.Thread(target=emits)
    emitter.start()
    try:
        with running(database.dsn, (spec("s"), sink)) as harness:
            harness.owns_all()
            emitted(300)
            found = migrate(database.dsn, folder=folder)
            assert (found.before, found.after) == (SCHEMA_VERSION, NEXT)
            emitted(len(uids) + 300)
            done.set()
            emitter.join()
            harness.settled(60)
    finally:
        done.set()
    delivered = [event.uid for event in sink.delivered]
    assert sorted(delivered) == sorted(uids)
    places = {uid: place for place, uid in enumerate(uids)}
    for key in range(20):
        of_key = [places[uid] for uid in delivered if places[uid] % 20 == key]
        assert of_key == sorted(of_key)
    with database.connect() as conn:
        outbox.emit(conn, "t", 1)
        assert conn.execute("select current_setting('outbox.extra') like 'outbox.emit%'").fetchone() == (True,)


# -- grants -------------------------------------------------------------------------------------------------------


def test_roles_are_granted_again_after_every_migration(database: Database, folder: Path) -> None:
    gone = f"gone_{uuid4().hex}"
    with new_role(database, "app") as app, new_role(database, "relay") as relay:
        with database.connect(autocommit=True) as admin:
            admin.execute(f"create role {gone}".encode())
        found = migrate(database.dsn, grant_emit=[app, gone], grant_relay=[relay, relay])
        assert found.granted == (f"emit to {app}", f"emit to {gone}", f"relay to {relay}")
        assert str(found) == f"schema outbox has version {SCHEMA_VERSION}; granted {', '.join(found.granted)}"
        with database.connect(autocommit=True) as admin:
            admin.execute(f"drop owned by {gone} cascade".encode())
            admin.execute(f"drop role {gone}".encode())
        assert migrate(database.dsn).granted == ()
        found = migrate(database.dsn, folder=folder)
        assert found.granted == (f"emit to {app}", f"relay to {relay}")
        with database.connect(user=relay) as conn:
            assert conn.execute("select outbox_internal.extra()").fetchone() == (1,)
            recorded = conn.execute("select role_name, kind from outbox.grantee order by kind").fetchall()
        assert recorded == [(app, "emit"), (relay, "relay")]


def test_names_of_roles_are_quoted(database: Database) -> None:
    nasty = """Ro'le "x"; \\drop schema outbox"""
    name = sql.Identifier(nasty)
    with database.connect(autocommit=True) as admin:
        admin.execute(sql.SQL("create role {} login").format(name))
        try:
            assert migrate(database.dsn, grant_emit=[nasty], grant_relay=[nasty]).granted == (
                f"emit to {nasty}",
                f"relay to {nasty}",
            )
            with database.connect(user=nasty) as conn:
                outbox.emit(conn, "t", 1)
        finally:
            admin.execute(sql.SQL("drop owned by {} cascade").format(name))
            admin.execute(sql.SQL("drop role {}").format(name))


# -- the script ---------------------------------------------------------------------------------------------------


def psql(database: Database, text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as its first lines say."""
    file = tmp_path / "script.sql"
    file.write_text(text, encoding="utf-8")
    command = ["psql", "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", str(file), database.dsn]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture
def roles(empty_database: Database) -> Iterator[tuple[str, str]]:
    with new_role(empty_database, "app") as app, new_role(empty_database, "relay") as relay:
        yield app, relay


@pytest.mark.skipif(shutil.which("psql") is None, reason="psql is not installed")
def test_the_script_does_what_migrate_does(empty_database: Database, tmp_path: Path, roles: tuple[str, str]) -> None:
    app, relay = roles
    printed = script(grant_emit=[app], grant_relay=[relay])
    done = psql(empty_database, printed, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert meta(empty_database) == (SCHEMA_VERSION, BASELINE)
    assert migrate(empty_database.dsn) == MigrationResult(SCHEMA_VERSION, SCHEMA_VERSION)
    with empty_database.connect(user=app) as conn:
        outbox.emit(conn, "t", 1)
    with empty_database.connect(user=relay) as conn:
        assert conn.execute("select count(*) from outbox.event").fetchone() == (1,)
    again = psql(empty_database, printed, tmp_path)
    assert again.returncode == 3
    assert 'schema "outbox" already exists' in again.stderr
    with empty_database.connect() as conn:
        assert conn.execute("select count(*) from outbox.event").fetchone() == (1,)


# -- bad input ----------------------------------------------------------------------------------------------------


def refused(dsn: str) -> RelayError:
    """Return the error, which is one line without the password."""
    with pytest.raises(RelayError) as caught:
        migrate(dsn)
    shown: Any = caught.value
    while shown is not None:
        assert not any(piece in str(shown) for piece in ("s3cr", "t/p", "p@ss", "ss@"))
        shown = shown.__cause__ if shown.__suppress_context__ else shown.__context__
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_wrong_password_and_none(own_postgres: PostgresServer) -> None:
    with own_postgres.connect() as admin:
        admin.execute("create role guarded login password 'right'")
    own_postgres.require_password("guarded")
    connect = own_postgres.dsn("postgres", "guarded", password="right")
    until(lambda: _answers(connect), seconds=10, what="the right password is taken")
    wrong = refused(own_postgres.dsn("postgres", "guarded", password="s3cr"))
    assert isinstance(wrong, DatabaseUnusable)
    assert 'password authentication failed for user "guarded": check user name and password' in str(wrong)
    none = refused(own_postgres.dsn("postgres", "guarded"))
    assert isinstance(none, DatabaseUnusable)
    assert "requires a password, and the DSN contains none" in str(none)


def test_no_rights(empty_database: Database, database: Database) -> None:
    for place in (empty_database, database):
        with new_role(place, "stranger") as stranger:
            error = refused(place.dsn_as(stranger))
            assert isinstance(error, DatabaseUnusable)
            assert "permission denied" in str(error)
            assert "run migrate as the owner of schema outbox or, to create it, as a role that may" in str(error)


def test_a_schema_of_somebody_elses(empty_database: Database) -> None:
    with empty_database.connect() as conn:
        conn.execute("create schema outbox")
        conn.execute("create table outbox.event ()")
    assert "is not outbox-relay's: rename it or drop it" in str(refused(empty_database.dsn))


@pytest.mark.parametrize(
    ("states", "kind"),
    [
        ("08006 25006 25P03 40001 40P01 53300 53200 55P03 57014 57P01 57P02 57P03 58030 XX000", DatabaseUnavailable),
        ("28000 28P01 3D000 3F000 42P01 42703 42883 0A000 22P02 23505", DatabaseUnusable),
        ("42501", RightMissing),
    ],
)
def test_which_errors_pass_by_themselves(states: str, kind: type[RelayError]) -> None:
    for state in states.split():
        error = explain(psycopg.errors.lookup(state)("row: s3cret"))
        assert type(error) is kind, state
        assert state in str(error)
        assert "s3cret" not in str(error)


def test_values_that_the_server_quotes_are_not_passed_on(database: Database) -> None:
    with database.connect() as conn, pytest.raises(psycopg.DataError) as caught:
        conn.execute("select 's3cret'::integer")
    assert "s3cret" in str(caught.value)
    assert str(explain(caught.value)) == "the database refused a statement (22P02)"


def test_no_function_compiles_its_queries(database: Database) -> None:
    """Servers before 18 take a query that may not scan a small table for expensive, and compile it for seconds."""
    found = query(
        database,
        "select p.proname, p.proconfig from pg_proc p"
        " where p.pronamespace = any ('{outbox, outbox_internal}'::regnamespace[])"
        " and 'enable_seqscan=off' = any (p.proconfig)",
    )
    assert {"claim_rows", "finish_unique_keys", "notify_dead"} <= {name for name, _ in found}
    assert [name for name, settings in found if "jit=off" not in settings] == []
