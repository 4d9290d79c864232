"""The application of Django: its migration, its checks and its command, on databases of PostgreSQL."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Generator
from typing import Any

import pytest
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.test.utils import override_settings
from psycopg.conninfo import conninfo_to_dict

from outbox_relay.contrib.django.databases import dsn_of
from outbox_relay.contrib.django.management.commands.outbox import COMMANDS
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.schema import SCHEMA_VERSION
from tests.docs.parsing import parsers
from tests.support import django_site
from tests.support.database import Database, query
from tests.support.pgbouncer import PgBouncer
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


def test_a_schema_of_another_program_is_refused(empty: Database) -> None:
    execute(empty, "create schema outbox")
    with pytest.raises(CommandError, match="not outbox-relay's"):
        migrated()
    assert query(empty, APPLIED) == [(0,)]


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


def test_no_command_that_needs_a_database_alone_is_missing() -> None:
    of_a_configuration = {"check", "config", "run"}
    servers = {"demo", "dev", "ui"}
    with_dsn = {name.split()[0] for name, each in parsers().items() if "--dsn DSN" in each.format_help()}
    assert with_dsn - of_a_configuration - servers == COMMANDS


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
