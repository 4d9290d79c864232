"""Ticks that come with a window: when they do, and what else a look must not disturb."""

from __future__ import annotations

# The tests set the times of connections, which depend on a clock.
# pyright: reportPrivateUsage=false
import asyncio
import errno
import threading
from collections.abc import Generator
from contextlib import contextmanager

import psycopg
import pytest
import structlog
from psycopg.conninfo import make_conninfo

from outbox_relay.domain.errors import ConfigurationError, DatabaseUnavailable
from outbox_relay.postgres import look_connection
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.look_connection import LookConnection, LookConnector
from outbox_relay.postgres.store import Store
from outbox_relay.relay.ticker import Ticker
from tests.property.follower import at_once, look_is_ready, opened
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, ids
from tests.support.memory_sink import MemorySink
from tests.support.proxy import Proxy
from tests.support.relay_harness import LOST, CountingStore, RelayHarness, running, spec
from tests.support.wait import auntil, until

READS = ("read_small", "read_rest", "read_late")
LOOKS = """
select pid from pg_stat_activity
 where datname = current_database() and query like '%%outbox_internal.look_small(%%' and pid <> pg_backend_pid()"""


OPEN = """
select pid from pg_stat_activity
 where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"""


def connector_of(store: Store) -> LookConnector:
    """Return the part of a store that makes its connections for looks."""
    worker = store._look_thread._worker
    assert worker is not None
    return worker.connector


async def has_trouble(store: Store) -> None:
    """Wait until a connection for looks could not be made."""

    async def fact() -> bool:
        store.prepare_look()
        return store.look_trouble is not None

    await auntil(fact, seconds=20, what="a connection could not be made")


async def replaced(database: Database, store: Store, before: list[tuple[int]]) -> bool:
    """Return True if looks are taken on another connection than ``before``."""
    await store.look(None, 0.0, at_once)
    found = query(database, LOOKS)
    return store.prepare_look() and bool(found) and found != before


@contextmanager
def allowing_no_connections(database: Database) -> Generator[None]:
    """Refuse new connections to the database. Existing ones stay open."""
    statement = 'alter database "{}" allow_connections {}'
    with psycopg.connect(database.server.dsn("postgres"), autocommit=True) as admin:
        admin.execute(statement.format(database.name, "false").encode())
        try:
            yield
        finally:
            admin.execute(statement.format(database.name, "true").encode())


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
        statements["look"] = "select nowhere"
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
        await look_is_ready(store)
        await store.look(None, 0.0, at_once)
        proxy.blackhole()
        with pytest.raises(DatabaseUnavailable, match="did not answer in time"):
            await store.look(None, 0.0, at_once)
        assert store.connection_losses == 1
        await look_is_ready(store)
        await store.look(None, 0.0, at_once)
        await store.close()


async def test_events_of_others_do_not_let_a_relay_sleep(database: Database) -> None:
    """Goes red when empty windows count as idleness: while a relay sleeps, each emit sends a notification."""
    sink = MemorySink()
    patterns = ("test.event",)
    async with running(database.dsn, (spec("s", patterns=patterns, types=patterns), sink)) as harness:
        await harness.owns_all()
        wanted = list[int]()

        async def comes_with_its_tick() -> bool:
            before = reads(harness)
            wanted.extend(emit(database, ["a"]))
            await delivered(sink, wanted)
            return reads(harness) == before

        await auntil(comes_with_its_tick, seconds=20, what="an event comes with its tick")
        with database.connect(autocommit=True) as listener:
            listener.execute("listen outbox")
            emits = "select outbox.emit('other', '{}')"
            await asyncio.to_thread(database.pgbench, emits, transactions=150, clients=4, options=("--rate=300",))
            notifications = list(listener.notifies(timeout=0, stop_after=10_000))
        assert len(notifications) < 150, "of 600 emits"


async def test_a_connection_that_cannot_be_replaced_stays_in_use(database: Database) -> None:
    """Goes red when a look connection is closed for its age before there is another one."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        wanted = emit(database, ["a"])
        await delivered(sink, wanted)
        before, session_epoch = query(database, LOOKS), harness.ticker.session_epoch
        connector = connector_of(harness.store)
        with database.connect(autocommit=True) as emitter:
            with allowing_no_connections(database):
                connector._outdated_at = 0.0
                await has_trouble(harness.store)
                row = emitter.execute("select outbox.emit('t', '{}', key => 'b')").fetchone()
                assert row is not None
                await auntil(lambda: asyncio.sleep(0, len(ids(sink)) == 2), seconds=20, what="the event is delivered")
                assert harness.store.prepare_look()
            assert query(database, LOOKS) == before
            connector._not_before = 0.0
            await auntil(lambda: replaced(database, harness.store, before), seconds=20, what="a new connection")
        assert harness.ticker.session_epoch == session_epoch


@pytest.mark.parametrize("error", [ConfigurationError("no such file"), OSError("no thread")])
async def test_a_connection_that_cannot_be_made_is_no_loss(
    database: Database, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when a file that cannot be read for a moment ends the relay, or drains its pool."""
    monkeypatch.setattr(look_connection, "PAUSE_SECONDS", 60.0)
    fails = False

    def dsn() -> str:
        if fails:
            raise error
        return database.dsn

    store = Store(dsn, pooler=False, connections=2)
    await store.open()
    await look_is_ready(store)
    fails = True
    store._look_thread.renew()
    await has_trouble(store)
    assert (str(error) in (store.look_trouble or "")) == isinstance(error, ConfigurationError)
    ticker = Ticker(store, CommitListener(None), 15.0, structlog.get_logger())
    for _ in range(20):
        await ticker.refresh()
    assert connector_of(store)._failures == 1, "there is a pause after it"
    assert (store.connection_losses, ticker.session_epoch) == (0, 0)
    fails, connector_of(store)._not_before = False, 0.0
    await look_is_ready(store)
    await ticker.refresh()
    assert store.look_trouble is None
    await store.close()


async def test_an_error_of_the_socket_is_a_loss(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when an error of the system that is not the driver's ends the process."""

    def wait(*_: object, **__: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    async with opened(database.dsn) as store:
        monkeypatch.setattr(LookConnection, "wait", wait)
        with pytest.raises(DatabaseUnavailable, match="Bad file descriptor"):
            await store.look(None, 0.0, at_once)
        assert store.connection_losses == 1


class HeldUp:
    """Holds the first connection for looks up while it is being made."""

    def __init__(self) -> None:
        self.held, self._reached = threading.Event(), threading.Event()
        self.attempts = 0
        self._connected = LookConnector._connected

    def connect(self, connector: LookConnector) -> LookConnection:
        self.attempts += 1
        connection = self._connected(connector)
        if not self._reached.is_set():
            self._reached.set()
            assert self.held.wait(20)
        return connection

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 20)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> HeldUp:
    made = HeldUp()

    def connected(connector: LookConnector) -> LookConnection:
        return made.connect(connector)

    monkeypatch.setattr(LookConnector, "_connected", connected)
    return made


async def test_a_connection_that_was_being_made_during_a_loss_is_not_used(database: Database, held_up: HeldUp) -> None:
    """Goes red when looks are taken on a server that the others have left."""
    store = Store(lambda: database.dsn, pooler=False, connections=2)
    await store.open()
    await held_up.reached()
    store.give_up_looks()
    held_up.held.set()
    await look_is_ready(store)
    assert held_up.attempts == 2
    await store.close()


async def test_a_store_that_is_opened_again_has_a_thread_of_its_own(database: Database, held_up: HeldUp) -> None:
    """Goes red when a thread that ends late uses, or closes, the connection of the next one."""
    store = Store(lambda: database.dsn, pooler=False, connections=2)
    await store.open()
    await held_up.reached()
    await store.close()
    with pytest.raises(DatabaseUnavailable):
        await store.look(None, 0.0, at_once)
    await store.open()
    held_up.held.set()
    await look_is_ready(store)
    for _ in range(3):
        await store.look(None, 0.0, at_once)
    connecting = "looks: connecting"
    until(lambda: all(t.name != connecting for t in threading.enumerate()), seconds=10, what="both have connected")
    assert len(query(database, OPEN)) == 2, "that of the looks, and one of the pool"
    await store.close()


async def test_the_thread_of_the_looks_ends_with_the_store(database: Database) -> None:
    async with opened(database.dsn) as store:
        for _ in range(3):
            await store.look(None, 0.0, at_once)
        assert any(thread.name == "looks" for thread in threading.enumerate())
    until(lambda: not any(thread.name == "looks" for thread in threading.enumerate()), seconds=5, what="it has ended")
    until(lambda: query(database, LOOKS) == [], seconds=5, what="its connection is closed")


async def test_the_reason_why_no_connection_can_be_made_is_named_by_every_statement(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when it is named only by the log line of looks, which come seldom while connections are refused."""
    monkeypatch.setattr("outbox_relay.postgres.database.CONNECT_SECONDS", 0.5)
    query(database, "drop role if exists locked_out")
    query(database, "create role locked_out login")
    store = Store(lambda: database.dsn_as("locked_out"), pooler=False, connections=2)
    try:
        await store.open()
        await look_is_ready(store)  # one that is still being made would end for another reason
        query(database, "alter role locked_out nologin")
        query(database, "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'locked_out'")
        store.give_up_looks()
        await has_trouble(store)
        said = ""
        async with asyncio.timeout(20):
            while not said.startswith("no database connection is available"):
                with pytest.raises(DatabaseUnavailable) as refused:
                    await store.schema()
                said = str(refused.value)
        assert 'role "locked_out" is not permitted to log in' in said
    finally:
        await store.close()
        query(database, "drop role locked_out")
