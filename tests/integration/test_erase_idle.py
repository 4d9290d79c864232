"""Erasures while nothing is emitted: sinks are idle, relays were restarted, or other sessions hold locks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit
from tests.support.erasing import erase
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.wait import until

WAITING = """select xact_start from pg_stat_activity
              where datname = current_database() and wait_event_type = 'Lock' and query like '%%outbox.erase(%%'"""


def test_a_delivered_key_is_erased_while_another_sink_is_idle(database: Database) -> None:
    sink, idle = MemorySink(), MemorySink()
    with running(database.dsn, (spec("s"), sink), (spec("idle", patterns=("none.*",)), idle)) as harness:
        harness.owns_all()
        delivered(sink, emit(database, ["k", "k"]))
        ended = erase(database, "--key", "k")
    assert (ended.code, ended.out) == (0, "2 events erased\n"), ended


def test_a_step_that_meets_a_lock_is_taken_again(database: Database) -> None:
    """Goes red when the first lock that is not available ends the command."""
    emit(database, ["k"])
    with ThreadPoolExecutor(1) as pool, database.connect() as action:
        action.execute("select from outbox.meta for update")
        erasure = pool.submit(erase, database, "--key", "k")
        tries = set[str]()
        until(lambda: _second(database, tries), seconds=20, what="a second try waits for the lock")
        action.rollback()
        ended = erasure.result(30)
    assert (ended.code, ended.out) == (0, "1 event erased\n"), ended


def _second(database: Database, tries: set[str]) -> bool:
    tries.update(str(start) for (start,) in query(database, WAITING))
    return len(tries) > 1
