"""One sink's trouble is its own: a statement that fails concerns its sender, and no connection is lost by it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg
import pytest
import structlog

from outbox_relay.domain.errors import DatabaseUnavailable, StatementFailed
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.connection_slots import (
    CHORES,
    FEWEST,
    FIGURES,
    LEASES,
    OTHER,
    ConnectionSlots,
    sink_caller,
)
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.migrations import migrate
from outbox_relay.relay.housekeeping import Chore, Housekeeping
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit
from tests.support.logs import RecordedLog
from tests.support.memory_sink import MemorySink
from tests.support.postgres import PostgresServer
from tests.support.relay_harness import CountingStore, running, spec
from tests.support.wait import auntil

T = TypeVar("T")

FAILING = {
    "cancelled": "select pg_cancel_backend(pg_backend_pid()), pg_sleep(600) where %(sink)s = 'ill'",
    "locked": "select 1 from pg_advisory_xact_lock(77) l where %(sink)s = 'ill' and l::text <> ''",
    "undecodable": "select '20000-01-01'::timestamptz where %(sink)s = 'ill'",
}
"""Statements in the place of the claim of rows: nothing for all other sinks."""
FAILED = "rows.claim_failed"


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * (how == "locked")) for how in FAILING])
async def test_a_sink_whose_statements_fail_ends_no_session(database: Database, how: str) -> None:
    """The rows of sink `ill` cannot be claimed; `well` reads the same log over the same pool."""
    ill, well = MemorySink(), MemorySink()
    async with running(database.dsn, (spec("ill"), ill), (spec("well"), well)) as harness:
        await harness.owns_all()
        wanted = emit(database, ["a", "b"])
        await delivered(well, wanted)
        session_epoch, statements = harness.ticker.session_epoch, harness.store._sql  # pyright: ignore[reportPrivateUsage]
        claim = statements["claim_rows"]
        with database.connect() as holder, structlog.testing.capture_logs() as lines:
            holder.execute("select pg_advisory_xact_lock(77)")
            statements["claim_rows"] = FAILING[how]  # pyright: ignore[reportArgumentType]
            await auntil(
                lambda: asyncio.sleep(0, [line["event"] for line in lines].count(FAILED) > 1), seconds=30, what=FAILED
            )
            wanted += emit(database, [f"k{n}" for n in range(50)])
            await delivered(well, wanted)
        statements["claim_rows"] = claim
        wanted += emit(database, ["c"])
        await delivered(well, wanted)
        await auntil(
            lambda: asyncio.sleep(0, {e.id for e in ill.delivered} == {*wanted}), seconds=20, what="ill is well"
        )
        assert harness.ticker.session_epoch == session_epoch, "what was read is not doubted"
        assert [relay.restarts for relay in harness.relays] == [Counter(), Counter()]
        assert harness.store.connection_losses == 0
    assert Counter(event.id for event in well.delivered) == Counter(wanted), "nothing came twice"


@pytest.mark.parametrize("table", ["relay", "sink"])
async def test_a_lock_that_stops_what_all_sinks_share_ends_no_session(database: Database, table: str) -> None:
    """Block heartbeats and questions about sinks for longer than the time limit for locks."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), lease_seconds=3.0) as harness:
        wanted = emit(database, ["before"])
        await delivered(sink, wanted)
        statements = harness.store._sql  # pyright: ignore[reportPrivateUsage]
        name = {"relay": "heartbeat", "sink": "sinks"}[table]
        statement = statements[name]
        with database.connect() as holder:
            holder.execute("select pg_advisory_xact_lock(78)")
            statements[name] = "select pg_advisory_xact_lock(78)"
            asked = harness.store.calls[name]
            await auntil(
                lambda: asyncio.sleep(0, harness.store.calls[name] > asked + 1), seconds=30, what="it asked again"
            )
            await delivered(sink, [*wanted, *emit(database, ["a"])])
        statements[name] = statement
        assert harness.relays[0].restarts == Counter()
        assert harness.store.connection_losses == 0
    assert len(sink.delivered) == 2


async def test_a_change_of_the_configuration_that_cannot_be_looked_at_ends_no_session(database: Database) -> None:
    """Every sink looks at it before it reads on."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), lease_seconds=3.0) as harness:
        wanted = emit(database, ["before"])
        await delivered(sink, wanted)
        statements = harness.store._sql  # pyright: ignore[reportPrivateUsage]
        statement, asked = statements["sinks"], harness.store.calls["sinks"]
        statements["sinks"] = "select pg_cancel_backend(pg_backend_pid()), pg_sleep(600)"
        config_versions = harness.ticker.config_versions
        with database.connect(autocommit=True) as connection:
            connection.execute("select outbox_internal.raise_config()")
        wanted += emit(database, ["a"])
        await auntil(
            lambda: asyncio.sleep(0, harness.ticker.config_versions != config_versions), seconds=10, what="it is seen"
        )
        asked = harness.store.calls["sinks"]
        await auntil(
            lambda: asyncio.sleep(0, harness.store.calls["sinks"] > asked + 5), seconds=20, what="it asked again"
        )
        assert len(sink.delivered) == 1, "nothing is read while the configuration is unknown"
        statements["sinks"] = statement
        await delivered(sink, wanted)
        assert harness.relays[0].restarts == Counter()


async def test_a_tick_that_is_cancelled_is_taken_again(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        wanted = emit(database, ["before"])
        await delivered(sink, wanted)
        session_epoch, statements = harness.ticker.session_epoch, harness.store._sql  # pyright: ignore[reportPrivateUsage]
        look, tick, asked = statements["look"], statements["tick"], harness.store.calls["tick"]
        for name in ("look", "tick"):
            statements[name] = "select pg_cancel_backend(pg_backend_pid()), pg_sleep(600)"
        await auntil(
            lambda: asyncio.sleep(0, harness.store.calls["tick"] > asked + 3), seconds=20, what="some have failed"
        )
        statements["look"], statements["tick"] = look, tick
        await delivered(sink, [*wanted, *emit(database, ["a"])])
        assert harness.ticker.session_epoch == session_epoch


async def test_a_value_that_cannot_be_loaded_and_one_that_cannot_be_sent_are_no_lost_connections(
    database: Database,
) -> None:
    store = CountingStore(database.dsn)
    await store.open()
    statements = store._sql  # pyright: ignore[reportPrivateUsage]
    for statement, parameters in (
        ("select '20000-01-01'::timestamptz", {}),
        ("select %(text)s::text", {"text": "a\0b"}),
        ("select %(text)s::text", {"text": "\ud800"}),
        ("select %(text)s::text", {"text": object()}),
        ("select 1/0", {}),
    ):
        statements["schema"] = statement  # pyright: ignore[reportArgumentType]
        with pytest.raises(StatementFailed, match="schema"):
            await store._rows("schema", parameters)  # pyright: ignore[reportPrivateUsage]
    assert store.connection_losses == 0
    await store.close()


async def test_a_call_that_runs_out_of_time_and_is_ended_by_the_server_is_no_lost_connection(
    database: Database,
) -> None:
    store = CountingStore(database.dsn, call_seconds=0.5)
    await store.open()
    store._sql["schema"] = "select pg_sleep(600)"  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StatementFailed, match=r"did not answer within 0\.5 s"):
        await store.schema()
    assert store.connection_losses == 0
    await store.close()


# -- who may use how many connections -----------------------------------------------------------------------------


async def test_a_sink_that_takes_all_it_can_leaves_connections_for_the_others() -> None:
    slots, release = ConnectionSlots(10), asyncio.Event()
    async with slots.taken(sink_caller("b"), "settle", 30):
        pass  # both sinks are known
    begun: Counter[str] = Counter()

    async def statement(who: str) -> None:
        async with slots.taken(who, "read_rest", 30):
            begun[who] += 1
            await release.wait()

    async with asyncio.TaskGroup() as tasks:
        for who in (sink_caller("a"), sink_caller("b"), LEASES, CHORES, FIGURES, OTHER):
            for _ in range(20):
                tasks.create_task(statement(who))
        await auntil(lambda: asyncio.sleep(0, begun.total() == 10), seconds=5, what="every slot is taken")
        assert begun == {":a": 3, ":b": 3, LEASES: 1, CHORES: 1, FIGURES: 1, OTHER: 1}
        release.set()
    assert set(begun.values()) == {20}, "all have had their turn"


async def test_who_gets_no_connection_in_time_is_told_and_takes_none() -> None:
    slots = ConnectionSlots(FEWEST)
    async with slots.taken(LEASES, "renew_shards", 1):
        with pytest.raises(StatementFailed, match="renew_shards had to wait"):
            async with slots.taken(LEASES, "renew_shards", 0.05):
                pytest.fail("it got one")
        async with slots.taken(sink_caller("a"), "settle", 1):
            pass
    async with slots.taken(LEASES, "renew_shards", 1):
        pass


async def test_a_wait_that_is_cancelled_gives_its_turn_back() -> None:
    slots = ConnectionSlots(1)
    async with slots.taken(OTHER, "a", 1):
        waiting = asyncio.create_task(_hold(slots))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with slots.taken(OTHER, "b", 1):
        pass


async def test_a_turn_that_comes_as_its_wait_is_cancelled_is_given_back() -> None:
    slots = ConnectionSlots(1)
    async with slots.taken(OTHER, "a", 1):
        waiting = asyncio.create_task(_hold(slots))
        await asyncio.sleep(0)
    waiting.cancel()  # the slot is its by now, and it has not run since
    await asyncio.gather(waiting, return_exceptions=True)
    async with slots.taken(OTHER, "b", 1):
        pass


async def _hold(slots: ConnectionSlots) -> None:
    async with slots.taken(OTHER, "c", 30):
        await asyncio.sleep(30)


async def test_no_connection_to_be_had_is_no_loss_of_those_that_there_are(own_postgres: PostgresServer) -> None:
    """The server refuses one more; those that are in use go on."""
    own_postgres.create_database("shop")
    migrate(own_postgres.dsn("shop"))
    with own_postgres.connect() as connection:
        connection.execute("create role limited login")
        connection.execute("alter role limited connection limit 1")
        connection.execute("grant connect on database shop to limited")
    store = CountingStore(own_postgres.dsn("shop", "limited"), call_seconds=2.0)
    await store.open()
    store._sql["schema"] = "select pg_sleep(1)"  # pyright: ignore[reportPrivateUsage]
    store._sql["relay_ranks"] = "select pg_sleep(60)"  # pyright: ignore[reportPrivateUsage]
    slow = asyncio.create_task(store._rows("relay_ranks", {}, deadline=8.0))  # pyright: ignore[reportPrivateUsage]
    await asyncio.sleep(0.1)
    with pytest.raises(DatabaseUnavailable, match=r"is available|did not answer"):
        await store.schema()
    assert store.connection_losses == 0
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    await store.close()


# -- what the server is, and what is said ---------------------------------------------------------------------------


async def test_a_reset_of_statistics_is_no_other_server(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        session_epoch, wanted = harness.ticker.session_epoch, [0][:0]
        for _ in range(4):
            wanted += emit(database, [f"k{n % 7}" for n in range(50)])
            query(database, "select pg_stat_reset_shared('wal')")
            await delivered(sink, wanted)
        assert harness.ticker.session_epoch == session_epoch
    assert Counter(event.id for event in sink.delivered) == Counter(wanted)


async def test_a_crash_of_one_process_of_the_server_takes_its_mark_away(own_postgres: PostgresServer) -> None:
    """The postmaster lives, so nothing else shows it; and the mark is given again, once."""
    own_postgres.create_database("shop")
    migrate(own_postgres.dsn("shop"))
    if own_postgres.major < 15:
        pytest.skip("before PostgreSQL 15 nothing tells such a crash")
    store = CountingStore(own_postgres.dsn("shop"))
    try:
        await store.open()
        before = (await store.tick()).incarnation
        victim = own_postgres.connect("shop")
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            victim.execute("select 1")
        victim.close()
        # For a moment the other processes of the server answer as before.
        crashed = await _incarnation(store, other_than=before)
        await _arm(store)
        armed = await _incarnation(store)
        await _arm(store)
        assert await _incarnation(store) == armed
        assert len({before, crashed, armed}) == 3
    finally:
        await store.close()


async def _incarnation(store: CountingStore, *, other_than: str = "") -> str:
    """Return the first incarnation other than that one with which the server answers."""

    async def tick() -> str | None:
        found = (await store.tick()).incarnation
        return found if found != other_than else None

    return await _until_answered(store, tick)


async def _arm(store: CountingStore) -> None:
    async def arm() -> bool:
        await store.arm()
        return True

    await _until_answered(store, arm)


async def _until_answered(store: CountingStore, call: Callable[[], Awaitable[T | None]]) -> T:
    """Repeat ``call`` until it is answered, and not with None.

    The pool may have several connections that the crash has closed.
    """

    async def answer() -> T | None:
        try:
            return await call()
        except DatabaseUnavailable:
            await store.replace_lost_connections()
            return None

    answered = await auntil(answer, seconds=30, what="the server has recovered")
    assert answered is not None
    return answered


async def _has_tried(listener: CommitListener) -> bool:
    """Let it try to connect, and return whether it listens."""
    await listener.begin_listening()
    if (trial := listener._connecting) is not None:  # pyright: ignore[reportPrivateUsage]
        await trial
    return await listener.begin_listening()


async def test_a_listening_connection_that_leads_elsewhere_is_named_once_and_not_used(
    database: Database, empty_database: Database
) -> None:
    store, log = CountingStore(database.dsn), RecordedLog()
    await store.open()
    right, wrong = (CommitListener(lambda d=d: d.dsn, store.database_identity, log) for d in (database, empty_database))
    await auntil(right.begin_listening, seconds=10, what="it listens")
    assert log.warnings == []
    for _ in range(3):
        assert not await _has_tried(wrong)
        wrong._retry_at = 0.0  # pyright: ignore[reportPrivateUsage]
    assert not wrong.listening
    assert log.warnings == [("database.other_listened", {})]
    await right.close()
    await store.close()


def test_what_happens_again_and_again_is_said_seldom_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [0.0], RecordedLog()
    monkeypatch.setattr("outbox_relay.domain.rate_limited_log.time.monotonic", lambda: now[0])
    limited = RateLimitedLog(log)
    for second in range(25):
        now[0] = float(second)
        limited.warning("it starts again", reason="away")
        limited.warning("it starts again", part="another")
    said = [values for _, values in log.warnings if "part" not in values]
    assert said == [{"reason": "away"}, {"reason": "away", "left_out": 9}, {"reason": "away", "left_out": 9}]
    assert len(log.warnings) == 6


async def test_a_chore_that_takes_long_is_done_seldom_and_one_that_fails_ends_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("outbox_relay.relay.housekeeping.time.monotonic", lambda: now[0])
    chores = Housekeeping(CountingStore(""), structlog.get_logger("test"))

    async def slow() -> int:
        now[0] += 0.4
        return 0

    async def fails() -> int:
        raise StatementFailed("no", "57014")

    behind = Chore("behind", slow, 5.0, 15.0, is_behind=lambda count: count == 0)
    for chore, due in (
        (Chore("slow", slow, 5.0, 15.0), 120.4),
        (Chore("fails", fails, 5.0, 15.0), 115.4),
        (behind, 101.2),
    ):
        await chores._do(chore)  # pyright: ignore[reportPrivateUsage]
        assert chore.due_at == pytest.approx(due)
