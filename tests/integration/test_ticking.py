"""Wake-up, incarnations, rebase: what a relay notices of the server, and what it does then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import structlog

from outbox_relay.domain.errors import DatabaseUnusable, IncarnationChanged, StatementFailed
from outbox_relay.domain.window import BEGINNING, Position, Tick
from outbox_relay.postgres.listener import LOCK, CommitListener
from outbox_relay.postgres.migrations import migrate, rebase
from outbox_relay.postgres.rows import Look, TickResult, WindowRequest
from outbox_relay.postgres.store import Store
from outbox_relay.relay.ticker import Ticker
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids
from tests.support.memory_sink import MemorySink
from tests.support.postgres import PostgresServer
from tests.support.relay_harness import LOST, CountingStore, RelayHarness, running, spec
from tests.support.wait import auntil

ASLEEP = "select 1 from pg_locks where locktype = 'advisory' and classid = %s and objid = %s and mode = 'ExclusiveLock'"


async def asleep(database: Database) -> None:
    """Wait until a relay sleeps."""
    await has(database, ASLEEP, *LOCK)


class Notified:
    """A connection that hears the notifications of emits."""

    def __init__(self, database: Database) -> None:
        self._connection = database.connect(autocommit=True)
        self._connection.execute("listen outbox")

    def count(self) -> int:
        """Return the number that came since the last call."""
        self._connection.execute("select 1")
        return len(list(self._connection.notifies(timeout=0.2)))

    def close(self) -> None:
        """Hear no more."""
        self._connection.close()


async def test_an_emit_wakes_a_sleeping_relay_and_notifies_nobody_while_it_is_awake(database: Database) -> None:
    heard = Notified(database)
    emit(database, ["nobody is there"])
    assert heard.count() == 0
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        await asleep(database)
        wanted = emit(database, ["a"])
        assert heard.count() == 1
        await delivered(sink, wanted)
    heard.close()


async def test_the_lock_of_a_sleeper_is_given_back_when_there_is_work(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        await asleep(database)
        taken = harness.ticker.taken
        with database.connect() as held_open:
            held_open.execute("select outbox.emit('a', '1')")
        await auntil(lambda: _true(harness.ticker.taken > taken and len(sink.delivered) == 1), seconds=10, what="awake")
        await asleep(database)


async def test_without_a_direct_connection_a_relay_polls(database: Database) -> None:
    heard = Notified(database)
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), listen=False) as harness:
        await harness.owns_all()
        await delivered(sink, emit(database, ["a"]))
        await harness.settled()
        assert query(database, ASLEEP, *LOCK) == []
        await delivered(sink, emit(database, ["b"]))
    assert heard.count() == 0
    heard.close()


async def test_a_wakeup_connection_that_breaks_is_made_again(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        await asleep(database)
        query(
            database,
            "select pg_terminate_backend(pid) from pg_locks "
            "where locktype = 'advisory' and classid = %s and objid = %s",
            *LOCK,
        )
        await delivered(sink, emit(database, ["a"]))
        await asleep(database)


async def _true(value: bool) -> bool:
    return value


class Scripted(CountingStore):
    """A store whose ticks are given: a mock, because a server cannot be made to go back at will."""

    def __init__(self, tick_results: list[TickResult]) -> None:
        super().__init__("")
        self._results = tick_results

    def prepare_look(self) -> bool:
        """Return True: a look is the next result."""
        return True

    async def arm(self, *, to_look: bool = False) -> None:
        """Do nothing: the server of the test has no mark."""

    async def look(self, request: WindowRequest | None, patience: float, is_news: object) -> Look:
        """Return the next tick result; after the last, that one each time."""
        del request, patience, is_news
        result = self._results.pop(0) if len(self._results) > 1 else self._results[0]
        return Look(result, None, time.monotonic(), (0.0,))


def tick_results(*changes: dict[str, Any]) -> list[TickResult]:
    """Return a first tick result, then others that differ from it by ``changes``."""
    import datetime

    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    first: dict[str, Any] = {"seq": 10, "snapshot": "100:100:", "next_xid": 100, "incarnation": "a"}
    made: list[TickResult] = []
    for change in ({}, *changes):
        values = {**first, **change}
        tick = Tick(values["seq"], values["snapshot"], values["next_xid"])
        made.append(TickResult(tick, values["incarnation"], now, 1))
    return made


@pytest.mark.parametrize(
    ("change", "doubted"),
    [
        ({"seq": 11}, False),
        ({"seq": 11, "snapshot": "101:102:101", "next_xid": 103}, False),
        ({"incarnation": "b"}, True),
        ({"seq": 9}, True),
        ({"next_xid": 99}, True),
    ],
)
async def test_what_was_read_is_doubted_when_the_server_is_not_the_same(change: dict[str, Any], doubted: bool) -> None:
    ticker = Ticker(Scripted(tick_results(change)), CommitListener(None), 15.0, structlog.get_logger())
    await ticker.refresh()
    session_epoch = ticker.session_epoch
    await ticker.refresh()
    if doubted:
        with pytest.raises(IncarnationChanged):
            ticker.since(session_epoch)
    else:
        assert ticker.since(session_epoch) is not None


class Overtaking(Scripted):
    """A store whose first tick is answered last, as on a connection of its own it may be: a mock, for its order."""

    async def look(self, request: WindowRequest | None, patience: float, is_news: object) -> Look:
        """Return the next tick result, the earlier the longer it takes."""
        look = await super().look(request, patience, is_news)
        await asyncio.sleep(0.05 * len(self._results))
        return look


async def test_the_newest_tick_is_the_one_that_was_asked_for_last() -> None:
    """A session that begins looks while the ticks of others go on."""
    ticker = Ticker(
        Overtaking(tick_results({"seq": 11}, {"seq": 12})), CommitListener(None), 15.0, structlog.get_logger()
    )
    await ticker.refresh()
    session_epoch = ticker.session_epoch
    await asyncio.gather(ticker.refresh(), ticker.refresh())
    assert ticker.session_epoch == session_epoch
    assert ticker.since(session_epoch) == Tick(12, "100:100:", 100)


SPEAK_OF_TICKS: dict[str, Callable[[Store, str], Awaitable[object]]] = {
    "read_rest": lambda store, server: store.read_rest([0], None, BEGINNING, BEGINNING, 0, 9, 9, 9, server=server),
    "read_small": lambda store, server: store.read_small([0], None, BEGINNING, BEGINNING, 0, 9, 9, 9, server=server),
    "read_late": lambda store, server: store.read_late([0], None, BEGINNING, BEGINNING, 0, 9, 9, 9, server=server),
    "settle": lambda store, server: store.settle("s", uuid4(), {0: (9, Position(BEGINNING))}, [], {}, server=server),
    "positions": lambda store, server: store.positions("s", [0], server=server),
    "blocked_keys": lambda store, server: store.blocked_keys("s", [0], hold=False, server=server),
    "still_blocked": lambda store, server: store.still_blocked("s", ["a"], hold=False, server=server),
    "highest_discarded": lambda store, server: store.highest_discarded("s", server=server),
    "discarded": lambda store, server: store.discarded("s", [(1, UUID(int=1))], server=server),
    "register_sinks": lambda store, server: store.register_sinks([("t", ["*"], None)], BEGINNING, server=server),
}


@pytest.mark.parametrize("name", SPEAK_OF_TICKS)
async def test_what_speaks_of_ticks_is_refused_by_every_server_but_theirs(database: Database, name: str) -> None:
    store = CountingStore(database.dsn)
    await store.open()
    look = await store.tick()
    await store.register_sinks([("s", ["*"], None)], look.tick, server=look.incarnation)
    await SPEAK_OF_TICKS[name](store, look.incarnation)
    written = "select (select count(*) from outbox.progress), (select count(*) from outbox.sink)"
    before, losses = query(database, written), store.connection_losses
    with pytest.raises(IncarnationChanged):
        await SPEAK_OF_TICKS[name](store, look.incarnation + "0")
    assert query(database, written) == before
    assert store.connection_losses > losses, "whoever holds a tick of the other server is told"
    await store.close()


async def test_a_lost_connection_anywhere_makes_what_was_read_doubtful(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), expects=LOST) as harness:
        await harness.owns_all()
        session_epoch = harness.ticker.session_epoch
        query(
            database,
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
            "and pid <> pg_backend_pid() and backend_type = 'client backend'",
        )
        wanted = emit(database, ["a", "b"])
        await delivered(sink, wanted)
        assert harness.ticker.session_epoch > session_epoch


async def test_a_statement_that_is_refused_for_a_lock_makes_nothing_doubtful(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await delivered(sink, emit(database, ["a"]))
        session_epoch = harness.ticker.session_epoch
        with database.connect() as dropping:
            [(newest,)] = dropping.execute(
                "select max(relname) from pg_class where relkind = 'r' and relname ~ '^event_2'"
            ).fetchall()
            dropping.execute(f"drop table outbox.{newest}".encode())
        with database.connect() as holder:
            holder.execute("lock table outbox.event_default in access exclusive mode")
            with pytest.raises(StatementFailed, match="55P03"):
                await harness.store.make_partitions()
            holder.rollback()
        await delivered(sink, emit(database, ["b"]))
        assert harness.ticker.session_epoch == session_epoch


@pytest.mark.parametrize("mode", [pytest.param("fast", marks=pytest.mark.slow), "immediate"])
async def test_a_restart_of_the_database_is_survived_and_noticed(own_postgres: PostgresServer, mode: Any) -> None:
    own_postgres.create_database("shop")
    migrate(own_postgres.dsn("shop"))
    database = Database(own_postgres, "shop")
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), expects=LOST) as harness:
        first = emit(database, [f"k{n}" for n in range(50)])
        await delivered(sink, first)
        session_epoch = harness.ticker.session_epoch
        await asyncio.to_thread(own_postgres.restart, mode)
        second = emit(database, [f"k{n}" for n in range(50)])
        await delivered(sink, second)
        assert harness.ticker.session_epoch > session_epoch
        await harness.settled()
    assert set(ids(sink)) == {*first, *second}


async def test_a_log_whose_numbers_are_not_the_servers_is_not_relayed_until_it_is_rebased(database: Database) -> None:
    """As after a restore into another cluster: xids that are stored lie ahead, the sequence lies behind."""
    sink = MemorySink()
    done = emit(database, ["a", "b"])
    harness = RelayHarness(database.dsn, [(spec("s"), sink)])
    await harness.start()
    await delivered(sink, done)
    await harness.settled()
    await harness.stop()
    waiting = emit(database, ["a", "b", "a"])
    with database.connect() as connection:
        connection.execute("update outbox.event set xid = (xid::text::bigint + 1000000000)::text::xid8")
        connection.execute(SHIFT, {"by": 1_000_000_000})
        connection.execute("select setval('outbox.event_id_seq', 1)")
    store = CountingStore(database.dsn)
    await store.open()
    with pytest.raises(DatabaseUnusable, match="rebase"):
        await store.floor()
    query(database, "insert into outbox.relay values (gen_random_uuid(), 'r', '0', '{}') returning 1")
    with pytest.raises(DatabaseUnusable, match="stop every relay"):
        rebase(database.dsn)
    query(database, "delete from outbox.relay returning 1")
    floor = rebase(database.dsn)
    assert floor == waiting[-1]
    assert await store.floor() == floor
    await store.close()
    successor = MemorySink()
    async with running(database.dsn, (spec("s"), successor)) as again:
        await delivered(successor, waiting)
        after = emit(database, ["a", "b"])
        assert min(after) > floor
        await delivered(successor, after)
        await again.settled()
        await again.lease_manager.round()
        more = emit(database, ["a"])
        await delivered(successor, more)
    assert ids(successor) == [*waiting, *after, *more], "what was delivered before is not read again"
    newcomer = MemorySink()
    async with running(database.dsn, (spec("later"), newcomer)) as last:
        await delivered(newcomer, [*done, *waiting, *after, *more])
        await last.settled()
    assert ids(newcomer) == [*done, *waiting, *after, *more], "a sink that begins at the beginning misses nothing"


SHIFT = """update outbox.progress set
    a_next = a_next + %(by)s,
    a_snapshot = format('%%s:%%s:', pg_snapshot_xmin(a_snapshot)::text::bigint + %(by)s,
                        pg_snapshot_xmax(a_snapshot)::text::bigint + %(by)s)::pg_snapshot
    where a_next > 3"""


def test_a_tick_inside_a_transaction_with_an_xid_is_refused(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("select pg_current_xact_id()")
        with pytest.raises(psycopg.errors.RaiseException, match="transaction of its own"):
            connection.execute("select * from outbox_internal.tick()")
