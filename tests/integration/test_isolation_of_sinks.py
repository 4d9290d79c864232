"""One sink's trouble is its own: a statement that fails concerns its sender, and no connection is lost by it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import psycopg
import pytest
import structlog

from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.deliveries import delivered, emit
from tests.support.memory_sink import MemorySink
from tests.support.postgres import PostgresServer
from tests.support.relay_harness import CountingStore, running, spec
from tests.support.wait import until

T = TypeVar("T")

FAILING = {
    "cancelled": "select pg_cancel_backend(pg_backend_pid()), pg_sleep(600) where %(sink)s = 'ill'",
    "locked": "select 1 from pg_advisory_xact_lock(77) l where %(sink)s = 'ill' and l::text <> ''",
    "undecodable": "select '20000-01-01'::timestamptz where %(sink)s = 'ill'",
}
"""Statements in the place of the claim of rows: nothing for all other sinks."""
FAILED = "rows.claim_failed"


@pytest.mark.fence("a failed statement of one sink ends sessions of others")
@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * (how == "locked")) for how in FAILING])
def test_a_sink_whose_statements_fail_ends_no_session(database: Database, how: str) -> None:
    """The rows of sink `ill` cannot be claimed; `well` reads the same log over the same pool."""
    ill, well = MemorySink(), MemorySink()
    with running(database.dsn, (spec("ill"), ill), (spec("well"), well)) as harness:
        harness.owns_all()
        wanted = emit(database, ["a", "b"])
        delivered(well, wanted)
        statements = harness.store._sql  # pyright: ignore[reportPrivateUsage]
        claim = statements["claim_rows"]
        with database.connect() as holder, structlog.testing.capture_logs() as lines:
            holder.execute("select pg_advisory_xact_lock(77)")
            statements["claim_rows"] = FAILING[how]  # pyright: ignore[reportArgumentType]
            until(lambda: [line["event"] for line in lines].count(FAILED) > 1, seconds=30, what=FAILED)
            wanted += emit(database, [f"k{n}" for n in range(50)])
            delivered(well, wanted)
        statements["claim_rows"] = claim
        wanted += emit(database, ["c"])
        delivered(well, wanted)
        until(lambda: {e.id for e in ill.delivered} == {*wanted}, seconds=20, what="ill is well")
        assert harness.loops[0].restarts == Counter()
        assert [relay.restarts for relay in harness.loops] == [Counter(), Counter()]
        assert harness.store.connection_losses == 0
    assert Counter(event.id for event in well.delivered) == Counter(wanted), "nothing came twice"


@pytest.mark.parametrize("table", ["relay", "sink"])
def test_a_lock_that_stops_what_all_sinks_share_ends_no_session(database: Database, table: str) -> None:
    """Block heartbeats and questions about sinks for longer than the time limit for locks."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink), lease_seconds=3.0) as harness:
        wanted = emit(database, ["before"])
        delivered(sink, wanted)
        statements = harness.store._sql  # pyright: ignore[reportPrivateUsage]
        name = {"relay": "heartbeat", "sink": "sinks"}[table]
        statement = statements[name]
        with database.connect() as holder:
            holder.execute("select pg_advisory_xact_lock(78)")
            statements[name] = "select pg_advisory_xact_lock(78)"
            asked = harness.store.calls[name]
            until(lambda: harness.store.calls[name] > asked + 1, seconds=30, what="it asked again")
            delivered(sink, [*wanted, *emit(database, ["a"])])
            statements[name] = statement
            asked = harness.store.calls[name]
            until(lambda: harness.store.calls[name] > asked, seconds=30, what="the last one that waits is cancelled")
        assert harness.loops[0].restarts == Counter()
        assert harness.store.connection_losses == 0
    assert len(sink.delivered) == 2


# -- what the server is, and what is said ---------------------------------------------------------------------------


def test_a_crash_of_one_process_of_the_server_takes_its_mark_away(own_postgres: PostgresServer) -> None:
    """The postmaster lives, so nothing else shows it; and the mark is given again, once."""
    own_postgres.create_database("shop")
    migrate(own_postgres.dsn("shop"))
    if own_postgres.major < 15:
        pytest.skip("before PostgreSQL 15 nothing tells such a crash")
    store = CountingStore(own_postgres.dsn("shop"))
    try:
        store.open()
        before = (store.tick()).incarnation
        victim = own_postgres.connect("shop")
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            victim.execute("select 1")
        victim.close()
        # For a moment the other processes of the server answer as before.
        crashed = _incarnation(store, other_than=before)
        _arm(store)
        armed = _incarnation(store)
        _arm(store)
        assert _incarnation(store) == armed
        assert len({before, crashed, armed}) == 3
    finally:
        store.close()


def _incarnation(store: CountingStore, *, other_than: str = "") -> str:
    """Return the first incarnation other than that one with which the server answers."""

    def tick() -> str | None:
        found = (store.tick()).incarnation
        return found if found != other_than else None

    return _until_answered(tick)


def _arm(store: CountingStore) -> None:
    def arm() -> bool:
        store.arm()
        return True

    _until_answered(arm)


def _until_answered(call: Callable[[], T | None]) -> T:
    """Repeat ``call`` until it is answered, and not with None.

    The pool may have several connections that the crash has closed.
    """

    def answer() -> T | None:
        try:
            return call()
        except DatabaseUnavailable:
            return None

    answered = until(answer, seconds=30, what="the server has recovered")
    assert answered is not None
    return answered
