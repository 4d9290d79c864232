"""The application of Django: its migration, its checks and its command, on databases of PostgreSQL."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Generator, Iterable
from typing import Any

import pytest
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction
from django.test.utils import override_settings
from psycopg.conninfo import conninfo_to_dict

from outbox_relay.contrib.django.databases import dsn_of
from outbox_relay.contrib.django.management.commands.outbox import COMMANDS
from outbox_relay.contrib.django.operations import OutboxSchema
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.schema import SCHEMA_VERSION, script
from tests.docs.parsing import parsers
from tests.support import django_site
from tests.support.database import Database, query
from tests.support.deliveries import has
from tests.support.memory_sink import MemorySink
from tests.support.pgbouncer import PgBouncer
from tests.support.relay_harness import running, spec
from tests.support.replays import start
from tests.support.roles import new_role
from tests.support.sink_actions import register

django_site.set_up()

EXISTS = "select to_regnamespace('outbox') is not null"
APPLIED = "select count(*) from django_migrations where app = 'outbox_relay'"


class Nowhere:
    """A router that has schema outbox in no database."""

    def allow_migrate(self, _db: str, app_label: str, **_: Any) -> bool | None:
        """Return False for the outbox."""
        return False if app_label == "outbox_relay" else None


@pytest.fixture
def empty(empty_database: Database) -> Generator[Database]:
    """Yield a database without a schema, as ``default``."""
    django_site.place(DEFAULT_DB_ALIAS, empty_database)
    yield empty_database
    connections.close_all()


@pytest.fixture
def site(database: Database) -> Generator[Database]:
    """Yield a database with the schema, as ``default``."""
    django_site.place(DEFAULT_DB_ALIAS, database)
    yield database
    connections.close_all()


def execute(database: Database, *statements: str) -> None:
    """Execute statements as the owner."""
    with database.connect() as owner:
        for statement in statements:
            owner.execute(statement.encode())


def migrated(*arguments: str, **options: Any) -> str:
    """Run ``manage.py migrate outbox_relay`` and return its output."""
    output = io.StringIO()
    call_command("migrate", "outbox_relay", *arguments, stdout=output, stderr=output, **options)
    return output.getvalue()


def checked(alias: str = DEFAULT_DB_ALIAS) -> list[str]:
    """Return the messages of the checks about a database, with their ids."""
    found = checks.run_checks(databases=[alias], include_deployment_checks=False)
    return [f"{each.id}: {each.msg}" for each in found if str(each.id).startswith("outbox_relay.")]


# -- the migration ------------------------------------------------------------------------------------------------


def test_the_migration_makes_the_schema_of_this_version(empty: Database) -> None:
    migrated()
    assert query(empty, "select schema_version from outbox.meta") == [(SCHEMA_VERSION,)]
    migrate(empty.dsn)
    assert "nothing to do" in str(migrate(empty.dsn))
    with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
        cursor.execute("select current_setting('search_path')")
        assert cursor.fetchone() == ('"$user", public',)


def test_the_migration_is_reversible_and_repeatable(empty: Database) -> None:
    for _ in range(2):
        migrated()
        assert query(empty, EXISTS) == [(True,)]
        migrated("zero")
        assert (query(empty, EXISTS), query(empty, APPLIED)) == ([(False,)], [(0,)])


def test_the_migration_keeps_a_schema_of_this_version(site: Database) -> None:
    query(site, "select outbox.emit('t', '{}')")
    migrated()
    assert query(site, "select count(*) from outbox.event") == [(1,)]


def test_a_schema_of_another_program_is_refused(empty: Database) -> None:
    execute(empty, "create schema outbox")
    with pytest.raises(CommandError, match="not outbox-relay's"):
        migrated()
    assert query(empty, APPLIED) == [(0,)]


def test_a_newer_schema_stays_as_it_is_or_is_refused(site: Database) -> None:
    execute(site, "update outbox.meta set schema_version = 900, min_relay = 1")
    migrated()
    assert query(site, "select schema_version from outbox.meta") == [(900,)]
    assert checked() == [
        f"outbox_relay.I001: database 'default': schema outbox has version 900, newer than this outbox-relay's "
        f"{SCHEMA_VERSION}, which works on it"
    ]
    execute(site, "update outbox.meta set min_relay = 900", "delete from django_migrations")
    with pytest.raises(CommandError, match="install a newer outbox-relay; nothing was changed"):
        migrated()
    assert checked()[0].startswith("outbox_relay.W007")


def test_sqlmigrate_prints_the_script(empty: Database) -> None:
    output = io.StringIO()
    call_command("sqlmigrate", "outbox_relay", "0001", stdout=output)
    assert "create table outbox.event" in output.getvalue()
    assert query(empty, EXISTS) == [(False,)]
    with empty.connect(autocommit=True) as conn:
        conn.execute(output.getvalue().encode())
    assert query(empty, "select schema_version from outbox.meta") == [(SCHEMA_VERSION,)]


def test_other_databases_stay_as_they_are(empty: Database) -> None:
    migrated(database="lite")
    with connections["lite"].cursor() as cursor:
        cursor.execute("select count(*) from django_migrations where app = 'outbox_relay'")
        assert cursor.fetchone() == (1,)
    migrated("zero", database="lite")
    with override_settings(DATABASE_ROUTERS=[Nowhere()]):
        migrated()
        assert query(empty, EXISTS) == [(False,)]
        assert checked() == ["outbox_relay.W001: no database of DATABASES can have schema outbox"]


# -- its reverse --------------------------------------------------------------------------------------------------


def refused_to_drop(database: Database) -> str:
    """Return the reason for which the schema is not dropped."""
    with pytest.raises(CommandError) as caught:
        migrated("zero")
    assert query(database, EXISTS) == [(True,)]
    assert str(caught.value).endswith("Nothing was changed")
    return str(caught.value)


def test_a_log_that_no_sink_has_read_is_kept(site: Database) -> None:
    migrated()
    query(site, "select outbox.emit('t', '{}')")
    assert "no relay has registered a sink yet" in refused_to_drop(site)


def test_undelivered_events_and_dead_letters_are_kept(site: Database) -> None:
    migrated()
    register(site, "crm", "*")
    query(site, "select outbox.emit('t', '{}')")
    assert "sink crm has 1 undelivered events" in refused_to_drop(site)


def test_a_schema_that_relays_use_is_kept(site: Database) -> None:
    migrated()
    register(site, "crm", "*")
    execute(
        site,
        "insert into outbox.relay (id, name, version, sinks) values (gen_random_uuid(), 'here', '1', array['crm'])",
    )
    assert "relays serve sink crm: here" in refused_to_drop(site)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("select outbox.once('billing', gen_random_uuid())", "the inbox has marks"),
        (
            "insert into outbox.delivery "
            "(sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at) "
            "values ('~7', 1, 0, 'dead', false, now(), gen_random_uuid(), 't', 'text/plain', now())",
            "there are deliveries that wait or are dead",
        ),
    ],
    ids=["inbox", "row of a replay"],
)
def test_marks_and_rows_of_replays_are_kept(site: Database, statement: str, said: str) -> None:
    migrated()
    register(site, "crm", "*")
    execute(site, statement)
    assert said in refused_to_drop(site)


def test_a_replay_that_is_not_done_is_kept(site: Database) -> None:
    migrated()
    query(site, "select outbox.emit('t', '{}')")
    with running(site.dsn, (spec("crm"), MemorySink())):
        has(site, "select from outbox_internal.backlog('crm', null, 1000, 5.0) where events = 0")
    start(site, "crm", since="PT1H")
    execute(site, "delete from outbox.relay")
    assert "a replay is not done: cancel it, or let it end" in refused_to_drop(site)


def settings_of(cursor: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the values of settings."""
    found: dict[str, str] = {}
    for name in names:
        cursor.execute(f"show {name}")
        [found[name]] = cursor.fetchone()
    return found


def test_settings_of_the_session_do_not_change_the_schema(empty: Database) -> None:
    """They are those of a database, so that the connection of Django has them too."""
    name = conninfo_to_dict(empty.dsn)["dbname"]
    execute(empty, "create access method other type table handler heap_tableam_handler")
    others = {
        "default_table_access_method": "other",
        "DateStyle": "German, DMY",
        "TimeZone": "Asia/Kolkata",
        "standard_conforming_strings": "off",
        "escape_string_warning": "off",
        "default_tablespace": "pg_global",
    }
    with empty.connect(autocommit=True) as owner:
        for setting, value in others.items():
            owner.execute(f"alter database {name} set {setting} = '{value}'".encode())
    connections[DEFAULT_DB_ALIAS].close()
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            before = settings_of(cursor, others)
            assert before["DateStyle"] == "German, DMY"
            OutboxSchema().database_forwards("outbox_relay", connection.schema_editor(atomic=False), None, None)
            assert settings_of(cursor, others) == {**before, "standard_conforming_strings": "on"}
    finally:
        with empty.connect(autocommit=True) as owner:
            for setting in others:
                owner.execute(f"alter database {name} reset {setting}".encode())
    of_the_schema = "from pg_class where relnamespace = 'outbox'::regnamespace and relkind = 'r'"
    assert query(empty, f"select distinct reltablespace {of_the_schema}") == [(0,)]
    assert query(empty, f"select distinct amname from pg_am where oid in (select relam {of_the_schema})") == [("heap",)]
    assert "nothing to do" in str(migrate(empty.dsn))
    query(empty, "select outbox.emit('order.created', '{}')")


@pytest.mark.usefixtures("empty")
def test_the_migration_leaves_its_limits_to_nothing_after_it() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("set local lock_timeout = '7s'")
        cursor.execute(script(have=0))
        cursor.execute("show lock_timeout")
        assert cursor.fetchone() == ("7s",)


# -- the checks ---------------------------------------------------------------------------------------------------


def test_checks_name_a_missing_and_an_old_schema(empty: Database) -> None:
    assert checked() == ["outbox_relay.W005: database 'default': schema outbox is missing"]
    migrated()
    assert checked() == []
    execute(empty, "update outbox.meta set schema_version = 19")
    assert checked()[0].startswith("outbox_relay.W006: database 'default': schema outbox has version 19, and this")
    assert checked("lite") == []


def test_a_role_that_may_only_emit_gets_no_warning(site: Database) -> None:
    with new_role(site, "app") as user:
        migrate(site.dsn, grants={"emit": [user]})
        django_site.place(DEFAULT_DB_ALIAS, site, user=user)
        with transaction.atomic():
            assert checked() == []
            with connections[DEFAULT_DB_ALIAS].cursor() as cursor:
                cursor.execute("select 1")  # the transaction goes on
        execute(site, f"grant create on schema public to {user}")
        with pytest.raises(CommandError, match="as the owner of the schema"):
            migrated()
        connections.close_all()
        execute(site, f"drop owned by {user}")


@pytest.mark.usefixtures("site")
def test_a_database_without_autocommit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections[DEFAULT_DB_ALIAS].settings_dict, "AUTOCOMMIT", False)
    said = "database 'default' has AUTOCOMMIT = False, and emit refuses to run outside an atomic block"
    assert checked() == [f"outbox_relay.W008: {said}"]
    monkeypatch.setitem(connections[DEFAULT_DB_ALIAS].settings_dict, "AUTOCOMMIT", True)
    assert checked() == []


def test_a_database_that_does_not_answer_is_a_warning(site: Database) -> None:
    django_site.place(DEFAULT_DB_ALIAS, site, name="nowhere")
    said = "database 'default' could not be asked for schema outbox (OperationalError)"
    assert checked() == [f"outbox_relay.W003: {said}"]


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("empty")
def test_the_command_runs_the_commands_of_the_relay(capfd: pytest.CaptureFixture[str]) -> None:
    call_command("outbox", "migrate")
    assert "was created with version" in capfd.readouterr().out
    call_command("outbox", "--database", "default", "status", "--json")
    assert capfd.readouterr().out.startswith("{")
    with pytest.raises(CommandError, match="exit code 3") as caught:
        call_command("outbox", "why", "00000000-0000-7000-8000-000000000000")
    assert caught.value.returncode == 3


@pytest.mark.usefixtures("site")
def test_the_command_writes_to_its_own_output(capfd: pytest.CaptureFixture[str]) -> None:
    output, messages = io.StringIO(), io.StringIO()
    call_command("outbox", "status", "--json", stdout=output, stderr=messages)
    assert json.loads(output.getvalue())["sinks"] == {}
    call_command("outbox", "audit", stdout=output, stderr=messages)
    with pytest.raises(CommandError):
        call_command("outbox", "pause", "crm", stdout=output, stderr=messages)
    assert messages.getvalue().startswith("there is no sink")
    assert messages.getvalue().endswith("\n")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name one of the commands"),
        (["run"], "name one of the commands"),
        (["status", "--dsn", "postgresql:///x"], "settings.DATABASES"),
        (["status", "--dsn=x"], "settings.DATABASES"),
        (["--database", "shpo", "status"], "DATABASES has no 'shpo'; it has default, shop, lite"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        call_command("outbox", *arguments)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_takes_a_database(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    from outbox_relay.cli import main

    assert main([command, "--dsn", "postgresql:///", "--help"]) == 0
    assert "--dsn" in capfd.readouterr().out


def test_no_command_that_needs_a_database_alone_is_missing() -> None:
    of_a_configuration = {"check", "config", "run"}
    servers = {"bench", "demo", "dev", "drill", "ui"}
    with_dsn = {name.split()[0] for name, each in parsers().items() if "--dsn DSN" in each.format_help()}
    assert with_dsn - of_a_configuration - servers == COMMANDS


@pytest.mark.usefixtures("site")
def test_schedules_and_the_catalogue_are_asked(capfd: pytest.CaptureFixture[str]) -> None:
    call_command("outbox", "schedules", "list", "--json")
    assert json.loads(capfd.readouterr().out) == {"schedules": []}
    call_command("outbox", "catalogue", "check", "tests.support.declared")
    assert "order.created: no events" in capfd.readouterr().out


@pytest.mark.usefixtures("site")
def test_the_password_reaches_libpq_and_no_message(capfd: pytest.CaptureFixture[str]) -> None:
    wrapper = connections[DEFAULT_DB_ALIAS]
    kept = dict(wrapper.settings_dict)
    wrapper.settings_dict.update(
        PASSWORD="it's s3cret \\ x", NAME="nowhere", OPTIONS={"sslmode": "disable", "assume_role": "a b", "pool": False}
    )
    try:
        found = conninfo_to_dict(dsn_of(DEFAULT_DB_ALIAS))
        assert (found["password"], found["sslmode"], found["options"]) == (
            "it's s3cret \\ x",
            "disable",
            "-c role=a\\ b",
        )
        for wrong in (["status"], ["status", "--no-such-option"], ["dead", "list", "--limit", "x"]):
            with pytest.raises(CommandError) as caught:
                call_command("outbox", *wrong)
            printed = capfd.readouterr()
            assert "s3cret" not in printed.out + printed.err + str(caught.value)
    finally:
        wrapper.settings_dict.update(kept)


def test_the_command_runs_directly_although_django_uses_no_cursors_of_the_server(
    database: Database, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when a pooler is taken for granted: behind one, the settings of the database would be refused."""
    query(database, f"alter database {database.name} set timezone = 'Europe/Berlin'")
    django_site.place(DEFAULT_DB_ALIAS, database)
    monkeypatch.setitem(connections[DEFAULT_DB_ALIAS].settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
    call_command("outbox", "status", "--json")
    assert json.loads(capfd.readouterr().out)["sinks"] == {}
    connections.close_all()


def test_the_command_runs_behind_a_pooler_of_transactions(
    database: Database, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when the command does not tell that it is behind one: the pooler refuses its session."""
    monkeypatch.delenv("OUTBOX_RELAY_DATABASE__POOLER", raising=False)
    with PgBouncer(database.server) as pooler:
        django_site.place(DEFAULT_DB_ALIAS, database)
        settings = connections[DEFAULT_DB_ALIAS].settings_dict
        monkeypatch.setitem(settings, "PORT", str(pooler.port))
        monkeypatch.setitem(settings, "DISABLE_SERVER_SIDE_CURSORS", True)
        call_command("outbox", "status", "--json")
        assert json.loads(capfd.readouterr().out)["sinks"] == {}
        assert "OUTBOX_RELAY_DATABASE__POOLER" not in os.environ
        connections.close_all()
