"""Erasures while nothing is emitted: sinks are idle, relays were restarted, or other sessions hold locks."""

from __future__ import annotations

import asyncio

from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit
from tests.support.erasing import aerase
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.wait import auntil

WAITING = """select xact_start from pg_stat_activity
              where datname = current_database() and wait_event_type = 'Lock' and query like '%%outbox.erase(%%'"""


async def test_a_delivered_key_is_erased_while_another_sink_is_idle(database: Database) -> None:
    sink, idle = MemorySink(), MemorySink()
    async with running(
        database.dsn, (spec("s"), sink), (spec("idle", patterns=("none.*",), types=("none.%",)), idle)
    ) as harness:
        await harness.owns_all()
        await delivered(sink, emit(database, ["k", "k"]))
        ended = await aerase(database, "--key", "k")
    assert (ended.code, ended.out) == (0, "2 events erased\n"), ended


async def test_a_key_that_an_earlier_relay_delivered_is_erased_while_nothing_comes(database: Database) -> None:
    """The positions of the new owners are only those that they inherited."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        await delivered(sink, emit(database, ["k", "k"]))
        await harness.settled()
        await harness.stop()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        ended = await aerase(database, "--key", "k")
    assert (ended.code, ended.out) == (0, "2 events erased\n"), ended


async def test_a_step_that_meets_a_lock_is_taken_again(database: Database) -> None:
    """Goes red when the first lock that is not available ends the command."""
    emit(database, ["k"])
    with database.connect() as action:
        action.execute("select from outbox.meta for update")
        erasure = asyncio.create_task(aerase(database, "--key", "k"))
        tries = set[str]()
        await auntil(lambda: _second(database, tries), seconds=20, what="a second try waits for the lock")
        action.rollback()
        ended = await erasure
    assert (ended.code, ended.out) == (0, "1 event erased\n"), ended


async def _second(database: Database, tries: set[str]) -> bool:
    tries.update(str(start) for (start,) in query(database, WAITING))
    return len(tries) > 1
