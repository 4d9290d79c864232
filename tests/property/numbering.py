"""Transaction numbers of a throw-away cluster, set far ahead with pg_resetwal."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.postgres import PostgresServer
from tests.support.programs import NoProgram

WRAP = 2**32
"""The number at which the 32-bit counter of transactions begins again."""
SEGMENT = 2**20
"""Transactions whose states share one file of pg_xact; a number that begins one needs no file that is not there."""
PAGE = 2**15
"""Transactions whose states share one page, which also needs none."""

BURN = """
do $$
declare
    left_over integer := current_setting('burn.to')::bigint - pg_current_xact_id()::text::bigint;
begin
    for i in 1..left_over loop
        begin
            insert into burnt values (i);
        exception when division_by_zero then
            null;
        end;
    end loop;
end
$$
"""


def set_epoch(server: PostgresServer, epoch: int) -> None:
    """Go on with the same 32 bits, ``epoch`` times 2³² higher."""
    _reset(server, f"--epoch={epoch}")


def move_near_the_wrap(server: PostgresServer) -> None:
    """Go on a page of transactions before the 32-bit counter wraps.

    In steps of less than 2³¹, each behind a VACUUM that freezes everything: what is older than that would lie in the
    future (https://www.postgresql.org/docs/current/routine-vacuuming.html#VACUUM-FOR-WRAPAROUND).
    """
    for following in (WRAP // 3 // SEGMENT * SEGMENT, WRAP // 3 * 2 // SEGMENT * SEGMENT, WRAP - PAGE):
        _reset(server, f"--next-transaction-id={following}")
        _freeze(server)


def _reset(server: PostgresServer, option: str) -> None:
    """Skip the test, with the reason, on a version of which there is only the server."""
    try:
        server.bin("pg_resetwal")
    except NoProgram as reason:
        pytest.skip(str(reason))
    server.stop()
    server.run("pg_resetwal", option, server.data)
    server.start()


def _freeze(server: PostgresServer) -> None:
    with server.connect() as connection:
        connection.execute("update pg_database set datallowconn = true")
        databases = [name for (name,) in connection.execute("select datname from pg_database")]
    for database in databases:
        with server.connect(database) as connection:
            connection.execute("vacuum (freeze)")


def burn_to(dsn: str, following: int) -> None:
    """Use up transaction numbers so that the next one is close to ``following``, by savepoints that each write."""
    with psycopg.connect(dsn) as connection:
        connection.execute("create temporary table burnt (n integer) on commit drop")
        connection.execute("select set_config('burn.to', %s, true)", (str(following),))
        connection.execute(BURN)
