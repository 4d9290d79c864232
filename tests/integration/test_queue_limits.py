"""Limits across relays of a sink with ``claim = "rows"``, and what a limit must not do to anything else."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import structlog

from outbox_relay import outbox
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, RetryPolicy, Verdict
from outbox_relay.domain.sink_limits import spread_of
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.measures import RelayMeasures
from outbox_relay.relay.sink_spec import SinkSpec
from outbox_relay.service.sinks import ServedSinks
from outbox_relay.service.supervisor import Supervisor
from tests.support.database import Database, query
from tests.support.deliveries import has
from tests.support.memory_sink import MemorySink
from tests.support.queued import job, queue
from tests.support.rates import flow
from tests.support.relay_harness import CIRCUIT, RETRY, running, spec
from tests.support.wait import until

CLAIMS = pytest.mark.parametrize("claim", ["log", "rows"])
SPREAD = 600.0
OPTIONS: Any = {"lease_seconds": 2.0}


def limited(
    claim: str = "rows", *, retry: RetryPolicy = RETRY, circuit: CircuitPolicy = CIRCUIT, **limits: Any
) -> SinkSpec:
    """Return the sink ``s`` with limits."""
    return spec("s", claim=claim, order="none", retry=retry, circuit=circuit, **limits)


def emit(database: Database, events: int, key: str = "n::text") -> None:
    """Emit events in one transaction."""
    query(database, f"select outbox.emit('job', '1', key => {key}) from generate_series(1, {events}) n")


def delivered(sinks: Collection[MemorySink]) -> int:
    """Return the number of events that all sinks have delivered."""
    return sum(len(sink.delivered) for sink in sinks)


def types(sink: MemorySink) -> list[str]:
    """Return the types of the events that a sink has delivered."""
    return [event.type for event in sink.delivered]


# -- the rate ---------------------------------------------------------------------------------------------------------


def test_a_rate_keeps_priorities(database: Database) -> None:
    """Goes red when many rows are claimed long before they are sent."""
    with database.connect() as connection:
        outbox.emit_many(connection, [job("low", priority=-1)] * 200)
    sink = MemorySink(keeps_order=False)
    with running(database.dsn, (limited(rate_per_second=20.0), sink)):
        flow(lambda: len(sink.delivered), 12)
        with database.connect() as connection:
            outbox.emit_many(connection, [job("high", priority=9)])
        until(lambda: "high" in types(sink), seconds=30, what="the urgent one is delivered")
        assert types(sink).index("high") < 100


# -- what a limit must not do -----------------------------------------------------------------------------------------


@CLAIMS
def test_a_sink_at_its_limit_stops_no_other_and_keeps_no_lease(database: Database, claim: str) -> None:
    """One event in a hundred seconds: rows go back soon, without a counted claim, and the other sink delivers all."""
    emit(database, 300)
    slow, other = MemorySink(keeps_order=False), MemorySink(keeps_order=False)
    sinks = [(limited(claim, rate_per_second=0.01), slow), (spec("other"), other)]
    with running(database.dsn, *sinks, lease_seconds=3.0) as harness:
        until(lambda: len(other.delivered) == 300, seconds=30, what="the other sink delivers")
        assert len(slow.delivered) <= 1
        until(lambda: harness.loops[0].limits.waiting > 0, seconds=30, what="requests wait")
        has(database, "select where not exists (select from outbox.delivery where lease is not null)")
        assert query(database, "select coalesce(max(claims), 0) from outbox.delivery") == [(0,)]
        assert harness.loops[0].limits.waiting <= slow.max_in_flight + 1


# -- requests in flight -----------------------------------------------------------------------------------------------


def test_slots_of_a_session_that_fails_are_free_again(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence: goes red when slots are lost with the calls of a session, for all relays while this one runs."""

    async def slow(_event: StoredEvent, _attempt: int) -> Verdict:
        await asyncio.sleep(0.02)
        return DELIVERED

    sink = MemorySink(slow, keeps_order=False)
    with running(
        database.dsn, (limited(max_in_flight_total=2), sink), expects={"connection_lost"}, **OPTIONS
    ) as harness:
        delete, failed = harness.store.delete_rows, 0

        def fail_with_a_slot(*parts: Any, **options: Any) -> Any:
            nonlocal failed
            if (session := harness.loops[0].session) and session.dispatcher.in_flight and not failed:
                failed += 1
                raise DatabaseUnavailable("lost")
            return delete(*parts, **options)

        monkeypatch.setattr(harness.store, "delete_rows", fail_with_a_slot)
        emit(database, 20)
        flow(lambda: failed, 0)
        emit(database, 20)
        until(lambda: len(sink.delivered) >= 40, seconds=20, what="all come")


# -- scheduled events -------------------------------------------------------------------------------------------------


def later(uid: object, at: datetime, seconds: float = SPREAD) -> datetime:
    """Return when an event is due that was scheduled for ``at``."""
    return at + timedelta(seconds=spread_of(str(uid), seconds))


def spread_by(database: Database, seconds: float) -> None:
    """Set the spread of all sinks."""
    query(database, "update outbox.sink set spread_seconds = %s returning 1", seconds)


def test_spread_rows_are_in_the_queue_from_their_own_time_on(database: Database) -> None:
    """Goes red when a row is in the queue at the moment for which it was emitted."""
    with queue(database) as jobs:
        spread_by(database, SPREAD)
        at = datetime.now(UTC)
        uids = jobs.emit(*(job("t", deliver_at=at) for _ in range(40)))
        parked = jobs.park()
        rows = query(database, "select uid, due_at, deliver_at, ready from outbox.delivery where not ready")
        assert len(rows) > 30
        assert {uid: due for uid, due, _, _ in rows}.items() <= {UUID(uid): later(uid, at) for uid in uids}.items()
        assert all(due == deliver_at for _, due, deliver_at, _ in rows)
        assert parked.due_in is not None
        first = min(due for _, due, _, _ in rows)
        assert abs(parked.due_in - (first - datetime.now(UTC)).total_seconds()) < 30


@pytest.mark.fence("a file sets the limits of a sink that its relay cannot serve")
def test_a_relay_that_cannot_have_another_claim_sets_no_limits(database: Database) -> None:
    """Goes red when the limits of a file count whose sink this relay does not serve."""
    with running(database.dsn, (limited("log", rate_per_second=5.0), MemorySink(keeps_order=False))) as harness:
        harness.owns_all()
        log = structlog.get_logger("other")
        keeper = Keeper(harness.store, uuid4(), "other", "0", 15.0, log)
        other = ServedSinks(harness.store, keeper, harness.ticks, RelayMeasures(), Supervisor(log), log)
        sink = harness.as_sink(MemorySink(keeps_order=False))
        other.register({"s": limited("rows", rate_per_second=7.0)}, {"s": sink})
        assert query(database, "select claim, rate_per_second from outbox.sink") == [("log", 5.0)]
