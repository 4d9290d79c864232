"""docs/queue.md: the move from a table of jobs, as a drill with the statements and settings of the page."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import psycopg
import pytest

from examples.cutover import cutover
from tests.docs.pages import ROOT, blocks, commands
from tests.support.command import outbox_relay
from tests.support.database import Database, query
from tests.support.service import RelayService
from tests.support.wait import until

PAGE, EXAMPLE = "docs/queue.md", ROOT / "examples" / "cutover"
OF_PAGE = "postgresql://shop@localhost/shop"
WATCH, WORK = (f"examples.cutover.cutover:{name}" for name in ("watch", "work"))


def config(database: Database) -> str:
    """Return the settings of the move, with the handler that watches, for a database."""
    parts = [block.text for block in blocks(PAGE) if block.language == "toml" and "examples.cutover" in block.text]
    return f'[database]\ndsn = "{database.dsn}"\n{"".join(parts).replace(OF_PAGE, database.dsn)}'


def compare(database: Database, table: str) -> list[tuple[object, ...]]:
    """Run the comparison of the page with a table, and return the differences."""
    [text] = [block.text for block in blocks(PAGE) if block.language == "sql" and f"join {table}" in block.text]
    return query(database, text)


def order(database: Database, count: int) -> None:
    """Let the application ask for invoices, one transaction each."""
    with psycopg.connect(database.dsn) as conn:
        for number in range(count):
            with conn.transaction():
                cutover.order(conn, f"customer {number}", 100 + number)


def work_off(database: Database) -> int:
    """Let the old worker do all jobs that it has, and return how many these were."""
    done = 0
    with psycopg.connect(database.dsn, autocommit=True) as conn:
        while cutover.old_worker(conn):
            done += 1
    return done


def count(database: Database, table: str) -> int:
    """Return the number of rows of a table."""
    [(found,)] = query(database, f"select count(*) from {table}")
    return int(found)


@pytest.mark.slow  # moves them with a relay
def test_jobs_move_from_a_table_without_one_lost_or_done_twice(database: Database, tmp_path: Path) -> None:
    with database.connect() as owner:
        owner.execute((EXAMPLE / "database.sql").read_bytes())
    with RelayService(tmp_path, config(database), expects={"reload"}) as relay:
        order(database, 20)
        assert work_off(database) == 20
        until(lambda: count(database, "seen") == 20, seconds=60, what="the sink has seen all jobs")
        assert compare(database, "seen") == []
        [(lost,)] = query(database, "delete from seen where ctid = (select min(ctid) from seen) returning uid")
        assert compare(database, "seen") == [(lost, True, False)]

        [line] = [line for block in blocks(PAGE) for line in commands(block) if "replay" in line]
        assert outbox_relay(*shlex.split(line)[1:], "--yes", "--dsn", database.dsn).code == 0
        until(lambda: count(database, "rehearsed") == 20, seconds=60, what="the rehearsal has had all jobs")
        assert compare(database, "rehearsed") == []

        order(database, 5)  # the old queue has them, and the sink may have them before or after the flip
        relay.config.write_text(relay.config.read_text().replace(WATCH, WORK))
        relay.send(signal.SIGHUP)
        until(lambda: '"config.reloaded"' in relay.log.read_text(), seconds=60, what="the relay has the new handler")
        order(database, 10)
        until(lambda: count(database, "invoices") >= 30, seconds=60, what="the outbox writes invoices")
        assert work_off(database) == 15  # those that both have, and those that only the old queue does
        assert count(database, "invoices") == 35
        assert relay.stop() == 0
    totals = query(database, "select total, count(*) from invoices group by total having count(*) > 3")
    assert totals == []
