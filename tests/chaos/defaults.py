"""Faults of an administrator: settings of the relays' role and resets of statistics, undone after a while."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from tests.support.wait import until

if TYPE_CHECKING:
    from tests.chaos.database import DatabaseSide

SECONDS = (3.0, 6.0)
UNDO_SECONDS = 60.0
HOSTILE: Mapping[str, str] = {
    "TimeZone": "Asia/Kathmandu",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "bytea_output": "escape",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "search_path": "pg_temp",
    "array_nulls": "off",
    "quote_all_identifiers": "on",
    "enable_indexscan": "off",
}
RESETS = ("wal", "bgwriter")


def hostile_defaults(side: DatabaseSide, rng: random.Random) -> tuple[float, str]:
    """Change settings of the role on which a client may depend, and terminate its sessions."""
    names = rng.sample(sorted(HOSTILE), 4)
    return _held(side, rng, {name: HOSTILE[name] for name in names})


def reset_statistics(side: DatabaseSide, rng: random.Random) -> tuple[float, str]:
    """Reset the statistics of the server."""
    what = rng.choice(RESETS)
    with side.connect() as connection:
        connection.execute("select pg_stat_reset(), pg_stat_reset_shared(%s)", (what,))
    return time.monotonic(), what


def _held(side: DatabaseSide, rng: random.Random, settings: Mapping[str, str]) -> tuple[float, str]:
    with _set(side, settings):
        _begin_again(side)
        threading.Event().wait(rng.uniform(*SECONDS))  # the fault itself
    _begin_again(side)
    return time.monotonic(), ", ".join(sorted(settings))


@contextmanager
def _set(side: DatabaseSide, settings: Mapping[str, str]) -> Generator[None]:
    """Set the role's settings in this database, and restore the previous ones at the end."""
    with side.connect() as connection:
        before = _settings(connection)
        _alter(connection, {**before, **settings})
    try:
        yield
    finally:
        until(lambda: _given_back(side, before), seconds=UNDO_SECONDS, what="the role has its settings again")


def _settings(connection: psycopg.Connection) -> dict[str, str]:
    from tests.chaos.database import NAME, RELAY

    found = connection.execute(
        "select unnest(setconfig) from pg_db_role_setting where setrole = %s::regrole"
        " and setdatabase = (select oid from pg_database where datname = %s)",
        (RELAY, NAME),
    ).fetchall()
    return dict(str(setting).split("=", 1) for (setting,) in found)


def _given_back(side: DatabaseSide, before: Mapping[str, str]) -> bool:
    try:
        with side.connect() as connection:
            _alter(connection, before)
    except psycopg.OperationalError:
        return False
    return True


def _alter(connection: psycopg.Connection, settings: Mapping[str, str]) -> None:
    from tests.chaos.database import NAME, RELAY

    role, database = sql.Identifier(RELAY), sql.Identifier(NAME)
    with connection.transaction():
        connection.execute(sql.SQL("alter role {} in database {} reset all").format(role, database))
        for name, value in settings.items():
            # The elements of a list such as search_path are quoted one by one: quoted as a whole it would be one name.
            values = sql.SQL(", ").join(sql.Literal(part.strip()) for part in value.split(","))
            statement = sql.SQL("alter role {} in database {} set {} = {}")
            connection.execute(statement.format(role, database, sql.Identifier(name), values))


def _begin_again(side: DatabaseSide) -> None:
    """Terminate every session of the relays, so that they open new ones."""
    with side.connect() as connection:
        connection.execute("select pg_terminate_backend(pid) from unnest(%s::int[]) p (pid)", (side.relay_backends(),))
