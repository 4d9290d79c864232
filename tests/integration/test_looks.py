"""Ticks that come with a window: when they do, and what else a look must not disturb."""

from __future__ import annotations

import asyncio
import threading

import pytest
from psycopg.conninfo import make_conninfo

from outbox_relay.domain.errors import DatabaseUnavailable
from tests.property.follower import at_once, opened
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, ids
from tests.support.memory_sink import MemorySink
from tests.support.proxy import Proxy
from tests.support.relay_harness import LOST, CountingStore, RelayHarness, running, spec
from tests.support.wait import auntil, until

READS = ("read_rest", "read_late")
LOOKS = """
select pid from pg_stat_activity
 where datname = current_database() and query like '%%outbox.look(%%' and pid <> pg_backend_pid()"""


def reads(harness: RelayHarness) -> int:
    """Return the number of reads that took a round trip of their own."""
    return sum(harness.store.calls[name] for name in READS)


async def test_events_of_the_only_sink_come_with_the_tick(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        wanted = emit(database, ["a"])
        await delivered(sink, wanted)
        await harness.settled()
        before = reads(harness)
        for _ in range(20):
            wanted += emit(database, ["a", "b"])
            await delivered(sink, wanted)
        assert reads(harness) == before
    assert ids(sink) == wanted


async def test_sinks_that_share_ticks_read_apart_from_them(database: Database) -> None:
    """Otherwise the others would wait for the events of one."""
    sinks = [(spec(name), MemorySink()) for name in ("one", "other")]
    async with running(database.dsn, *sinks) as harness:
        await harness.owns_all()
        wanted, before = emit(database, ["a"]), 0
        for _ in range(10):
            for _, sink in sinks:
                await delivered(sink, wanted)
            before = reads(harness)
            wanted += emit(database, ["a"])
        for _, sink in sinks:
            await delivered(sink, wanted)
        assert reads(harness) - before >= len(sinks)


async def test_a_locked_partition_holds_up_no_tick(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        wanted = emit(database, ["a"])
        await delivered(sink, wanted)
        await harness.settled()
        with database.connect() as emitter, database.connect() as holder:
            emitter.execute("select outbox.emit('t', '{}', key => 'a')")
            holder.execute("lock table outbox.event_default in access exclusive mode nowait")
            emitter.commit()
            session_epoch, taken = harness.ticker.session_epoch, harness.store.calls["tick"]
            await auntil(
                lambda: asyncio.sleep(0, harness.store.calls["tick"] > taken),
                seconds=20,
                what="a tick without a window",
            )
            assert harness.ticker.session_epoch == session_epoch
            assert ids(sink) == wanted
        wanted += [max(row[0] for row in query(database, "select id from outbox.event"))]
        await delivered(sink, wanted)
        assert harness.relays[0].restarts.total() == 0


async def test_what_one_look_may_not_read_ends_no_ticks(database: Database) -> None:
    """A window that fails for a reason that needs a fix is the trouble of its session."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), expects={"database_unusable"}) as harness:
        await harness.owns_all()
        wanted = emit(database, ["a"])
        await delivered(sink, wanted)
        statements = harness.store._sql  # pyright: ignore[reportPrivateUsage]
        look, taken = statements["look"], harness.store.calls["tick"]
        statements["look"] = "select nowhere from outbox.look(%(a_seq)s, %(a)s, %(a_next)s)"
        wanted += emit(database, ["b"])
        await delivered(sink, wanted)
        assert harness.store.calls["tick"] > taken
        assert not harness.tasks[1].done(), "the ticker goes on"
        statements["look"] = look


async def test_a_look_connection_that_is_ended_is_made_again(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), expects=LOST) as harness:
        await harness.owns_all()
        wanted = emit(database, ["a"])
        await delivered(sink, wanted)
        session_epoch = harness.ticker.session_epoch
        [(pid,)] = query(database, LOOKS)
        query(database, "select pg_terminate_backend(%s)", pid)
        wanted += emit(database, ["b"])
        await delivered(sink, wanted)
        assert harness.ticker.session_epoch > session_epoch
        assert query(database, LOOKS) != [(pid,)]


async def test_a_look_that_gets_no_answer_ends_in_time(database: Database) -> None:
    with Proxy() as proxy:
        proxy.target = database.server.port
        store = CountingStore(make_conninfo(database.dsn, host="127.0.0.1", port=proxy.port), call_seconds=0.5)
        await store.open()
        await store.look(None, 0.0, at_once)
        proxy.blackhole()
        with pytest.raises(DatabaseUnavailable, match="did not answer in time"):
            await store.look(None, 0.0, at_once)
        assert store.connection_losses == 1
        await store.look(None, 0.0, at_once)
        await store.close()


async def test_the_thread_of_the_looks_ends_with_the_store(database: Database) -> None:
    before = threading.active_count()
    async with opened(database.dsn) as store:
        for _ in range(3):
            await store.look(None, 0.0, at_once)
        assert threading.active_count() > before
    until(lambda: not any(thread.name == "looks" for thread in threading.enumerate()), seconds=5, what="it has ended")
    assert query(database, LOOKS) == []
