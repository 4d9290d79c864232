"""The store's connections: every wait has an end, lost ones are replaced, and sinks take none of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import LiteralString

import pytest
from psycopg.conninfo import make_conninfo

from outbox_relay.domain.errors import DatabaseUnavailable, StatementFailed
from outbox_relay.postgres.schema import SCHEMA_VERSION
from outbox_relay.postgres.store import Store
from tests.support.database import Database, end_connections, query
from tests.support.proxy import Proxy
from tests.support.wait import until

SLEEPING = "select 1 from pg_stat_activity where query = 'select pg_sleep(1.5)' and state = 'active'"
SLEEP = "select pg_sleep(60)"


@pytest.fixture
def store(database: Database) -> Generator[Store]:
    """Yield an open store with one connection for sinks, one for replays, and one for the others."""
    store = Store(
        lambda: database.dsn, pooler=False, connections=1, sink_connections=1, replay_connections=1, call_seconds=5.0
    )
    store.open()
    yield store
    store.close()


def run(store: Store, statement: LiteralString, seconds: float = 5.0) -> list[object]:
    """Run a statement as the store runs those of its files."""
    store._sql["probe"] = statement  # pyright: ignore[reportPrivateUsage]
    return store.named("probe", {}, seconds)


def sessions(database: Database) -> int:
    """Return the number of connections to the database, without the one that asks."""
    text = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    [(count,)] = query(database, text)
    return count


@pytest.mark.parametrize(
    "query",
    [SLEEP, "select repeat('x', 1000) from generate_series(1, 100000000)"],
    ids=["before the answer", "in the middle of a long answer"],
)
def test_a_statement_that_runs_out_of_time_is_cancelled_and_leaves_its_connection(
    database: Database, store: Store, query: LiteralString
) -> None:
    before, began = sessions(database), time.monotonic()
    with pytest.raises(StatementFailed, match="57014"):
        run(store, query, 0.3)
    assert time.monotonic() - began < 3
    assert (sessions(database), store.connection_losses) == (before, 0)
    assert run(store, "select 1 as one") == [(1,)]


def test_a_server_that_falls_silent_is_given_up_and_every_connection_replaced(database: Database) -> None:
    with Proxy() as proxy:
        proxy.target = database.server.port
        dsn = make_conninfo(database.dsn, host="127.0.0.1", port=proxy.port)
        store = Store(lambda: dsn, pooler=False, connections=2, call_seconds=0.5)
        store.open()
        with store.transaction(), store.transaction():  # two connections
            pass
        proxy.blackhole()
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable, match="did not answer in time: statement schema"):
            store.schema()
        assert (store.connection_losses, time.monotonic() - began < 4) == (1, True)
        proxy.restore()
        assert store.schema()[0] == SCHEMA_VERSION
        store.close()


def test_ended_connections_are_counted_once_and_the_next_call_has_a_new_one(database: Database, store: Store) -> None:
    end_connections(database)
    with pytest.raises(DatabaseUnavailable):
        store.schema()
    assert store.schema()[0] == SCHEMA_VERSION
    assert store.connection_losses == 1


def test_sinks_that_wait_for_locks_take_no_connection_of_the_leases_or_of_replays(
    database: Database, store: Store
) -> None:
    """Red if sinks borrow from the others."""
    with ThreadPoolExecutor(2, initializer=store.as_sink) as sinks:
        waiting = [sinks.submit(run, store, "select pg_sleep(1.5)", 5.0)]
        until(lambda: query(database, SLEEPING), seconds=5, what="a sink's statement runs")
        began = time.monotonic()
        assert store.schema()[0] == SCHEMA_VERSION
        with ThreadPoolExecutor(1, initializer=lambda: store.as_sink(replay=True)) as replays:
            assert replays.submit(run, store, "select 1 as one").result() == [(1,)]
        assert time.monotonic() - began < 1
        waiting.append(sinks.submit(run, store, SLEEP, 0.5))
        with pytest.raises(StatementFailed, match="every connection that it may use was busy"):
            waiting[1].result()
        waiting[0].result()
    assert (sessions(database), store.connection_losses) == (2, 0)


def test_nothing_waits_for_an_answer_after_the_time_to_give_up(store: Store) -> None:
    ended = list[str]()

    def wait() -> None:
        try:
            run(store, SLEEP, 30.0)
        except DatabaseUnavailable as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    store.give_up_at = time.monotonic()
    thread.join(1.0)
    assert ended == ["the database did not answer in time: statement probe"]
    with pytest.raises(DatabaseUnavailable, match="there is no connection"):
        store.schema()


@pytest.mark.parametrize("change", [{"port": "1"}, {"user": "nobody"}], ids=["no server", "no such user"])
def test_why_no_connection_can_be_made_is_said_and_passes(database: Database, change: dict[str, str]) -> None:
    """A password may be on the way to be replaced: once there was a connection, the relay waits."""
    dsn = database.dsn
    store = Store(lambda: dsn, pooler=False, connections=1)
    store.open()
    end_connections(database)
    with pytest.raises(DatabaseUnavailable):
        store.schema()
    dsn = make_conninfo(database.dsn, **change)
    with pytest.raises(DatabaseUnavailable, match=r"refused|nobody"):
        store.schema()
    dsn = database.dsn
    assert store.schema()[0] == SCHEMA_VERSION
    store.close()
