"""Hostile defaults of a role: the relay delivers whatever they are, or says which one is wrong."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast
from uuid import uuid4

import pytest
from psycopg import sql

from outbox_relay.postgres.session_settings import CHECKED_SETTINGS, SESSION_SETTINGS
from tests.support.database import Database
from tests.support.deliveries import delivered, emit
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import CountingStore, running, spec
from tests.support.wait import until

HOSTILE = {
    "TimeZone": "Asia/Tokyo",
    "DateStyle": "German",
    "client_encoding": "LATIN1",
    "search_path": "hostile, pg_catalog",
    "row_security": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "statement_timeout": "1",
    "lock_timeout": "1",
    "idle_in_transaction_session_timeout": "1",
    "idle_session_timeout": "1",
    "transaction_timeout": "20",
    "jit": "on",
    "session_replication_role": "replica",
}
"""A default that would do harm, for every setting."""
SHADOW = """
create schema hostile;
create function hostile.unnest(text[]) returns setof text language sql as 'select null::text';
create function hostile.clock_timestamp() returns timestamptz language sql as 'select null::timestamptz'
"""


def test_every_setting_has_a_hostile_default() -> None:
    assert HOSTILE.keys() == {*SESSION_SETTINGS, *CHECKED_SETTINGS}


@pytest.fixture
def relay(database: Database) -> Generator[str]:
    """Yield a role that is granted nothing by hand: the schema's owner's rights, and defaults of its own."""
    name = f"relay_{uuid4().hex[:12]}"
    with database.connect(autocommit=True) as connection:
        connection.execute(sql.SQL("create role {} login superuser").format(sql.Identifier(name)))
        for statement in SHADOW.strip().split(";\n"):
            connection.execute(statement.encode())
    yield name
    with database.connect(autocommit=True) as connection:
        connection.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(name)))
        connection.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


def is_known(database: Database, name: str) -> bool:
    """Return True if the server has a setting."""
    with database.connect(autocommit=True) as connection:
        return connection.execute("select current_setting(%s, true)", [name]).fetchone() != (None,)


def poison(database: Database, role: str, name: str) -> None:
    """Make the hostile value the default of `role` in this database."""
    if not is_known(database, name):
        pytest.skip("this server has no such setting")
    with database.connect(autocommit=True) as connection:
        target = (sql.Identifier(role), sql.Identifier(database.name), sql.SQL(cast(Any, name)))
        value = sql.SQL(cast(Any, HOSTILE[name])) if name == "search_path" else sql.Literal(HOSTILE[name])
        connection.execute(sql.SQL("alter role {} in database {} set {} = {}").format(*target, value))


@pytest.mark.parametrize("name", ["all", *(pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE)])
def test_a_relay_delivers_whatever_the_default_of_its_role_is(database: Database, relay: str, name: str) -> None:
    for each in [each for each in HOSTILE if is_known(database, each)] if name == "all" else [name]:
        poison(database, relay, each)
    sink = MemorySink()
    with running(database.dsn_as(relay), (spec("s"), sink)) as harness:
        delivered(sink, emit(database, ["a", None, "ключ"]))
        harness.settled()
        until(lambda: harness._listener.listening, seconds=10, what="it listens")  # pyright: ignore[reportPrivateUsage]
        delivered(sink, emit(database, ["b"]))
        assert harness.ended == []


def test_the_settings_of_a_connection_outrank_those_of_its_dsn_and_of_the_environment(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    monkeypatch.setenv("PGDATESTYLE", "German")
    monkeypatch.setenv("PGOPTIONS", "-c lock_timeout=1 -c work_mem=123kB")
    for dsn, work_mem in (
        (database.dsn, "123kB"),
        (database.dsn_as("postgres", options="-c work_mem=99kB -c jit=on", client_encoding="LATIN1"), "99kB"),
    ):
        store = CountingStore(dsn)
        store.open()
        names = [*SESSION_SETTINGS, "transaction_timeout"]
        found = dict(store.named("session_settings", {"names": [*names, "work_mem"]}))
        store.close()
        assert found.pop("work_mem") == work_mem
        wanted = {
            **SESSION_SETTINGS,
            "DateStyle": found["DateStyle"],
            "transaction_timeout": found["transaction_timeout"],
        }
        assert found == wanted
        assert found["DateStyle"].startswith("ISO")
        assert found["transaction_timeout"] in ("0", None)
