"""Handlers inside a transaction, without a relay: what is committed, what counts, and what is not the event's fault."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

from outbox_relay.delivery import Delivery
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.worker import transactions
from outbox_relay.worker.answers import DatabaseDown
from outbox_relay.worker.clock import clock
from outbox_relay.worker.transactions import Transactions
from tests.support.database import Database, query
from tests.support.pgbouncer import PgBouncer
from tests.support.python_sink import python_sink
from tests.support.wait import becomes

KINDS = ("transactional", "atransactional")


@pytest.fixture
def effects(database: Database) -> Database:
    """Return a database with a table in which handlers write their effects."""
    with database.connect(autocommit=True) as connection:
        connection.execute("create table effects (uid uuid)")
    return database


def written(database: Database) -> list[str]:
    return [uid for (uid,) in query(database, "select uid::text from effects order by uid")]


def marks(database: Database) -> int:
    return query(database, "select count(*) from outbox.inbox")[0][0]


END_CONNECTIONS = """select pg_terminate_backend(pid, 5000) from pg_stat_activity
                      where datname = current_database() and application_name = 'outbox-relay handler test'"""
FAULTS = {
    "commit": "ProgrammingError at ",
    "commit statement": "a handler must not end",
    "script": "a handler must not end",
    "many": "a handler must not end",
    "stream": "a handler must not end",
    "hidden failure": "a statement of the handler failed",
    "rollback": "the handler rolled its transaction back",
    "close": "delivery.connection was closed or lost",
    "pipeline": "the handler returned inside a pipeline",
    "open block": "OutOfOrderTransactionNesting at ",
    "a coroutine": "the handler returned an awaitable",
    "lose the connection": "delivery.connection was closed or lost",
    "named as ours": "DatabaseDown at support/odd_handlers.py:",
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_that_ends_its_transaction_fails_without_an_effect(
    effects: Database, tmp_path: Path, kind: str
) -> None:
    async with python_sink(kind, tmp_path, dsn=effects.dsn) as running:
        assert await running.deliver("first") == DELIVERED
        verdicts = {what: await running.deliver(what) for what in FAULTS}
        assert await running.deliver("last") == DELIVERED
        assert running.ends == []
    reasons = {what: verdict.reason for what, verdict in verdicts.items() if isinstance(verdict, Failed)}
    assert {what: reason[: len(FAULTS[what])] for what, reason in reasons.items()} == FAULTS
    assert (len(written(effects)), marks(effects)) == (2, 2)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_event_whose_connection_is_lost_has_its_effect_once(
    effects: Database, tmp_path: Path, kind: str
) -> None:
    async with python_sink(kind, tmp_path, dsn=effects.dsn) as running:
        event = an_event(None, b"lose it once")
        [first] = await running.sink.deliver([event], lease_clock() + 60)
        assert isinstance(first, Failed)
        for _ in range(2):
            assert await running.sink.deliver([event], lease_clock() + 60) == [DELIVERED]
    assert written(effects) == [event.uid]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_limit_that_ends_before_the_handler_is_called_counts_no_attempt(
    effects: Database, tmp_path: Path, kind: str
) -> None:
    """Another transaction marks the event, so that the mark waits. A plain handler's worker is killed."""
    async with python_sink(kind, tmp_path, dsn=effects.dsn, timeout_seconds=1.0) as running:
        assert await running.deliver("first") == DELIVERED
        event = an_event(None, b"waits")
        with effects.connect() as other, other.transaction():
            other.execute("select outbox.once('test', %s)", (event.uid,))
            [verdict] = await running.sink.deliver([event], lease_clock() + 60)
        assert isinstance(verdict, Unavailable)
        assert verdict.reason == "dsn: the handler's database did not answer in time"
        assert verdict.attempt is not None
        assert verdict.attempt.code == "database"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_an_effect_is_had_once_while_workers_are_killed_again_and_again(
    effects: Database, tmp_path: Path, kind: str
) -> None:
    events = [an_event(None, b"fine") for _ in range(400)]
    async with python_sink(kind, tmp_path, dsn=effects.dsn, workers=2, max_in_flight=16) as running:
        limit = asyncio.Semaphore(16)

        async def deliver(event: StoredEvent) -> None:
            async with limit:
                while await running.redeliver(event) != DELIVERED:  # it was the one whose worker was killed
                    pass

        async def kill() -> None:
            for wanted in (20, 80, 140, 200, 260):
                await becomes(lambda wanted=wanted: len(written(effects)) >= wanted, f"{wanted} effects")
                for pid in running.pids:
                    os.kill(pid, signal.SIGKILL)

        await asyncio.wait_for(asyncio.gather(kill(), *map(deliver, events)), 60)
        assert len(running.ends) >= 5
    assert written(effects) == sorted(event.uid for event in events)
    assert marks(effects) == len(events)


# -- the connections ----------------------------------------------------------------------------------------------


@pytest.fixture
def kept(effects: Database) -> Generator[Transactions]:
    """Yield transactions whose kept connections are closed at the end."""
    found = Transactions(effects.dsn, "test")
    yield found
    for connection in found._idle:  # pyright: ignore[reportPrivateUsage]
        connection.pgconn.finish()


def a_delivery() -> Delivery:
    now = datetime.now(UTC)
    return Delivery(uuid4(), "a", None, b"", "text/plain", {}, 1, now, None, now)


class Quiet:
    """A poll that reports nothing, as before the news of a lost connection has arrived."""

    def register(self, _descriptor: int, _events: int) -> None:
        """Take a descriptor."""

    def poll(self, _milliseconds: int) -> list[tuple[int, int]]:
        """Report nothing."""
        return []


def test_a_kept_connection_that_was_lost_is_the_databases_fault(
    effects: Database, kept: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[Delivery]()
    kept.run(a_delivery(), called.append, clock() + 10)
    query(effects, END_CONNECTIONS)
    monkeypatch.setattr(transactions.select, "poll", Quiet)
    with pytest.raises(DatabaseDown, match="cannot be used"):
        kept.run(a_delivery(), called.append, clock() + 10)
    kept.run(a_delivery(), called.append, clock() + 10)
    assert len(called) == 2


async def test_the_same_holds_for_asynchronous_handlers(
    effects: Database, kept: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[Delivery]()

    async def handler(delivery: Delivery) -> None:
        called.append(delivery)

    await kept.arun(a_delivery(), handler, clock() + 10)
    query(effects, END_CONNECTIONS)
    monkeypatch.setattr(transactions.select, "poll", Quiet)
    with pytest.raises(DatabaseDown, match="cannot be used"):
        await kept.arun(a_delivery(), handler, clock() + 10)
    await kept.arun(a_delivery(), handler, clock() + 10)
    assert len(called) == 2


CHANGES = (
    "set app.tenant to 'other'",
    "select set_config('search_path', 'pg_temp', false)",
    "create temporary table leftover (n integer)",
    "select pg_advisory_lock(7)",
    "set role pg_monitor",
    "set default_transaction_read_only to on",
)
"""Changes of a handler to its session. Without a reset, each would affect later events."""
SESSION = """select coalesce(current_setting('app.tenant', true), ''), current_setting('search_path'), current_user,
       current_setting('default_transaction_read_only'), to_regclass('pg_temp.leftover'), pg_backend_pid()::text,
       (select count(*)::text from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())"""


def test_what_a_handler_changes_in_its_session_does_not_reach_other_events(kept: Transactions) -> None:
    seen = list[object]()

    def handler(delivery: Delivery) -> None:
        connection = cast("psycopg.Connection[Any]", delivery.connection)
        seen.append(connection.execute(SESSION).fetchone())
        connection.row_factory, connection.cursor_factory = dict_row, psycopg.ClientCursor
        for change in CHANGES:
            connection.execute(change)

    for _ in range(8):
        kept.run(a_delivery(), handler, clock() + 10)
    assert len(set(seen)) == 1, "the same session each time, as at first"


async def test_nor_what_an_asynchronous_one_changes(kept: Transactions) -> None:
    seen = list[object]()

    async def handler(delivery: Delivery) -> None:
        connection = cast("psycopg.AsyncConnection[Any]", delivery.connection)
        seen.append(await (await connection.execute(SESSION)).fetchone())
        connection.row_factory, connection.cursor_factory = dict_row, psycopg.AsyncClientCursor
        for change in CHANGES:
            await connection.execute(change)

    for _ in range(8):
        await kept.arun(a_delivery(), handler, clock() + 10)
    assert len(set(seen)) == 1


GONE = "alter function outbox.once(text, uuid) rename to once_gone"
BACK = "alter function outbox.once_gone(text, uuid) rename to once"


def do(database: Database, statement: str) -> None:
    with database.connect(autocommit=True) as connection:
        connection.execute(statement.encode())


def test_a_session_that_cannot_mark_an_event_is_not_kept(effects: Database, kept: Transactions) -> None:
    """It may be on a server that is read only by now, behind a proxy that keeps the connection."""
    called = list[Delivery]()
    kept.run(a_delivery(), called.append, clock() + 10)
    do(effects, GONE)
    with pytest.raises(DatabaseDown, match="no inbox"):
        kept.run(a_delivery(), called.append, clock() + 10)
    assert not kept._idle  # pyright: ignore[reportPrivateUsage]
    do(effects, BACK)
    kept.run(a_delivery(), called.append, clock() + 10)
    assert len(called) == 2


async def test_nor_is_one_for_asynchronous_handlers(effects: Database, kept: Transactions) -> None:
    called = list[Delivery]()

    async def handler(delivery: Delivery) -> None:
        called.append(delivery)

    await kept.arun(a_delivery(), handler, clock() + 10)
    do(effects, GONE)
    with pytest.raises(DatabaseDown, match="no inbox"):
        await kept.arun(a_delivery(), handler, clock() + 10)
    assert not kept._idle  # pyright: ignore[reportPrivateUsage]
    do(effects, BACK)
    await kept.arun(a_delivery(), handler, clock() + 10)
    assert len(called) == 2


def columns(cursor: psycopg.Cursor[Any]) -> Any:
    """Make rows with a factory that needs columns, as one in the documentation of psycopg does."""
    names = [column.name for column in cast("Any", cursor.description)]

    def row(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    return row


def test_a_row_factory_of_a_handler_fails_neither_its_event_nor_the_next(kept: Transactions) -> None:
    def handler(delivery: Delivery) -> None:
        delivery.connection.row_factory = columns

    for _ in range(3):
        kept.run(a_delivery(), handler, clock() + 10)


def test_sessions_of_a_pooler_are_left_alone(effects: Database) -> None:
    """They are those of other clients, too. Goes red when what these have set is reset."""
    with (
        PgBouncer(effects.server, {"default_pool_size": 1}) as pooler,
        psycopg.connect(pooler.dsn(effects.name), autocommit=True) as other,
    ):
        pooled = Transactions(pooler.dsn(effects.name), "test")
        other.execute("set search_path to shop, public")
        for _ in range(3):
            pooled.run(a_delivery(), lambda _: None, clock() + 10)
        assert other.execute("show search_path").fetchone() == ("shop, public",)
        pooled._idle.pop().close()  # pyright: ignore[reportPrivateUsage]
