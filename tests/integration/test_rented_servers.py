"""Servers as they are rented: without MD5, position in the WAL or the cluster's identifier, and behind RDS Proxy."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psycopg
import pytest

from outbox_relay.postgres.migrations import migrate, rebase
from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit
from tests.support.memory_sink import MemorySink
from tests.support.postgres import PostgresServer
from tests.support.receiver import Receiver
from tests.support.relay_config import webhook_config
from tests.support.relay_harness import LOST, running, spec
from tests.support.wait import until

SOURCES = Path(__file__).parents[2]
CONTROL = (
    "out pg_control_version integer, out catalog_version_no integer, out system_identifier bigint, "
    "out pg_control_last_modified timestamptz"
)
REFUSED = {
    "md5(text)": "md5(text) returns text",
    "md5(bytea)": "md5(bytea) returns text",
    "pg_control_system()": f"pg_control_system({CONTROL})",
    "pg_current_wal_lsn()": "pg_current_wal_lsn() returns pg_lsn",
    "pg_current_wal_insert_lsn()": "pg_current_wal_insert_lsn() returns pg_lsn",
    "pg_walfile_name(pg_lsn)": "pg_walfile_name(pg_lsn) returns text",
}
"""Signature → the head of the function that takes its place: what Aurora, Azure and servers in FIPS mode refuse."""
CODES = ["XX000", "0A000"]
"""OpenSSL without MD5; "not supported"."""
ASKED = re.compile(r"\b(?:md5|pg_current_wal\w*|pg_walfile\w*|pg_control_\w+|pg_stat_wal|pg_stat_get_wal)\b\s*\(?")
RDS = "Feature not supported: RDS Proxy currently doesn\N{RIGHT SINGLE QUOTATION MARK}t support command-line options."


def checked(database: Database, directory: Path) -> Ended:
    """Run ``check --online``."""
    with Receiver() as receiver:
        file = directory / "relay.toml"
        text = webhook_config(database.dsn, receiver, directory)
        file.write_text(text.replace("[relay]", f'pooler = "transaction"\nlisten_dsn = "{database.dsn}"\n[relay]'))
        for each in (file, directory / "secrets"):
            each.chmod(0o600)
        return inside("check", "--online", "-c", file)


def answers(database: Database) -> bool:
    """Return True if the server takes connections."""
    try:
        return query(database, "select 1") == [(1,)]
    except psycopg.OperationalError:
        return False


def refuse(database: Database, code: str) -> None:
    """Let the server refuse what some do not have, in this database. A built-in function is known by its number."""
    with database.connect(autocommit=True) as admin:
        for signature, head in REFUSED.items():
            name = signature.partition("(")[0]
            admin.execute(f"alter function pg_catalog.{signature} rename to {name}_before".encode())
            admin.execute(
                f"create function pg_catalog.{head} language plpgsql as "
                f"$$ begin raise exception 'not here' using errcode = '{code}'; end $$".encode()
            )


def cluster(database: Database) -> int | None:
    """Return the cluster that the log belongs to."""
    [(found,)] = query(database, "select system_identifier from outbox.meta")
    return found


def relayed(database: Database) -> None:
    """Run a relay that delivers events."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        delivered(sink, emit(database, ["a", "b", None]))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("before", [True, False], ids=["before migrate", "after migrate"])
def test_everything_works_where_the_server_refuses(
    empty_database: Database, tmp_path: Path, code: str, *, before: bool
) -> None:
    database = empty_database
    if before:
        refuse(database, code)
        migrate(database.dsn)
        assert cluster(database) is None
    else:
        migrate(database.dsn)
        assert cluster(database) is not None
        refuse(database, code)
    relayed(database)
    ended = checked(database, tmp_path)
    assert ended.code == 0
    assert "database:" not in ended.err
    assert migrate(database.dsn).notes == ()
    relayed(database)
    query(database, "delete from outbox.relay returning 1")
    rebase(database.dsn)
    relayed(database)
    assert cluster(database) is None, "what is not told is not known"


@pytest.mark.parametrize("crash", [False, True], ids=["restart", "crash of a backend"])
def test_another_incarnation_is_noticed_where_the_server_refuses(own_postgres: PostgresServer, *, crash: bool) -> None:
    """A pooler may hide both: the session notices by what is left, the start time and the mark."""
    own_postgres.create_database("shop")
    database = Database(own_postgres, "shop")
    refuse(database, "55000")
    migrate(database.dsn)
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink), expects=LOST) as harness:
        harness.owns_all()
        delivered(sink, emit(database, ["a", "b"]))
        [(before,)] = query(database, INCARNATION)
        if crash:
            [(pid,)] = query(database, "select pg_backend_pid()")
            os.kill(pid, signal.SIGKILL)
        else:
            own_postgres.restart("immediate")
        until(lambda: answers(database), seconds=30, what="the server is up")
        delivered(sink, emit(database, ["a", "b"]))
        assert harness.ended, "the session has begun again"
        assert query(database, INCARNATION) != [(before,)]
        harness.settled()


INCARNATION = "select outbox_internal.incarnation()"


# -- RDS Proxy ------------------------------------------------------------------------------------------------------
