"""The tests' PostgreSQL server does what tests rely on."""

import os
import signal
import threading
from typing import LiteralString

import psycopg
import pytest
from psycopg.rows import TupleRow

from outbox_relay.workbench.embedded.postgres import IN_USE
from tests.support.database import Database
from tests.support.postgres import PostgresServer, wanted_major
from tests.support.wait import until


def scalar(connection: psycopg.Connection[TupleRow], query: LiteralString) -> object:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def test_server_has_the_wanted_version(postgres: PostgresServer) -> None:
    with postgres.connect() as connection:
        assert connection.info.server_version // 10_000 == wanted_major()


def test_databases_are_isolated(postgres: PostgresServer, empty_database: Database) -> None:
    postgres.create_database("other")
    with empty_database.connect() as connection:
        connection.execute("create table here ()")
    with postgres.connect("other") as connection:
        assert scalar(connection, "select to_regclass('here')") is None
    postgres.drop_database("other")


async def test_asynchronous_connection(empty_database: Database) -> None:
    async with await empty_database.aconnect() as connection:
        row = await (await connection.execute("select current_database()")).fetchone()
    assert row == (empty_database.name,)


def test_dropped_database_ends_its_connections(postgres: PostgresServer) -> None:
    postgres.create_database("left_open")
    with postgres.connect("left_open") as connection:
        postgres.drop_database("left_open")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")


def test_pgbench_runs_a_script(empty_database: Database) -> None:
    with empty_database.connect() as connection:
        connection.execute("create table made (client int)")
    empty_database.pgbench("insert into made values (:client_id);", transactions=5, clients=2)
    with empty_database.connect() as connection:
        assert scalar(connection, "select count(*) from made") == 10


def test_programs_that_fail_say_why(postgres: PostgresServer) -> None:
    with pytest.raises(RuntimeError, match="exists but is not empty"):
        postgres.run("initdb", "--pgdata", postgres.data)


@pytest.mark.parametrize("mode", ["fast", pytest.param("immediate", marks=pytest.mark.slow), "kill"])
def test_server_comes_back_with_its_data(own_postgres: PostgresServer, mode: str) -> None:
    with own_postgres.connect() as connection:
        connection.execute("create table kept ()")
    {
        "fast": own_postgres.stop,
        "immediate": lambda: own_postgres.stop("immediate"),
        "kill": own_postgres.kill,
    }[mode]()
    with pytest.raises(psycopg.OperationalError):
        own_postgres.connect()
    own_postgres.start()
    with own_postgres.connect() as connection:
        assert scalar(connection, "select to_regclass('kept')::text") == "kept"


def test_server_that_was_killed_comes_back_when_its_last_process_has_ended(own_postgres: PostgresServer) -> None:
    """A process that is stopped keeps the memory of the server in use."""
    with own_postgres.connect() as connection:
        left = connection.info.backend_pid
        os.kill(left, signal.SIGSTOP)
        own_postgres.kill()
    starting = threading.Thread(target=own_postgres.start)
    starting.start()
    try:
        until(lambda: IN_USE in own_postgres.log.read_text(), seconds=60, what="the server could not start yet")
    finally:
        os.kill(left, signal.SIGCONT)
    starting.join()
    own_postgres.connect().close()


def test_password_is_asked_of_the_role_named(own_postgres: PostgresServer) -> None:
    with own_postgres.connect() as connection:
        connection.execute("create role guarded login password 'right'")
    own_postgres.require_password("guarded")
    psycopg.connect(own_postgres.dsn(user="guarded", password="right")).close()
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(own_postgres.dsn(user="guarded", password="wrong"))


@pytest.mark.postgres
def test_server_that_cannot_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="unrecognized configuration parameter"), PostgresServer({"nonsense": 1}):
        pass


@pytest.mark.postgres
def test_nothing_is_left_behind() -> None:
    with PostgresServer() as server:
        directory, port = server.directory, server.port
    assert not directory.exists()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(host="127.0.0.1", port=port, user="postgres", connect_timeout=5)
