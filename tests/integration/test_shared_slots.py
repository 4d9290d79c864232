"""The requests in flight of all relays together: counted at a receiver while relays join, leave, crash, lose leases."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from outbox_relay.admin.status import status
from tests.support.database import Database, query
from tests.support.memory_sink import MemorySink
from tests.support.receiver import Receiver
from tests.support.receiver.gauge import Gauge
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import until
from tests.support.webhook_sink import a_sink

OPTIONS: Any = {"lease_seconds": 2.0, "expects": {"handed_over"}}


@pytest.fixture
def gauge() -> Gauge:
    return Gauge()


@pytest.fixture
def receiver(gauge: Gauge) -> Generator[Receiver]:
    with Receiver(gauge.answer) as receiver:
        yield receiver


def emit(database: Database, events: int) -> None:
    """Emit events of many keys in one transaction."""
    query(database, f"select outbox.emit('job', '1', key => n::text) from generate_series(1, {events}) n")


def a_relay(database: Database, receiver: Receiver, total: int, claim: str = "log") -> RelayHarness:
    """Return a relay of a sink with so many requests in flight."""
    sink_spec = spec("s", claim=claim, order="key" if claim == "log" else "none", max_in_flight_total=total)
    return RelayHarness(database.dsn, [(sink_spec, a_sink(receiver.url, timeout_seconds=1.0))], **OPTIONS)


def more(receiver: Receiver, requests: int) -> None:
    """Wait until further requests have come."""
    wanted = len(receiver.requests) + requests
    until(lambda: len(receiver.requests) >= wanted, seconds=60, what=f"{requests} further requests")


# -- at the receiver -------------------------------------------------------------------------------------------------


@pytest.mark.fence("a relay begins its share of the requests in flight while the owner before it has them")
def test_relays_that_join_and_leave_never_have_more_in_flight_together(
    database: Database, receiver: Receiver, gauge: Gauge
) -> None:
    """Goes red when each relay has the total, or its share before the owner of its shards sends less."""
    emit(database, 600)
    first, second = a_relay(database, receiver, 5), a_relay(database, receiver, 5)
    first.start()
    more(receiver, 60)
    assert gauge.most == 5
    second.start()
    until(lambda: second.store.calls["settle"] > 3, seconds=30, what="the second one delivers")
    assert (status(first.store))["sinks"]["s"]["max_in_flight_total"] == 5
    more(receiver, 60)
    first.stop()
    second.settled(60)
    assert gauge.most == 5
    second.stop()
    assert {len(receiver.requests), len({request.uid for request in receiver.requests})} == {600}


def test_parked_deliveries_count_too(database: Database, receiver: Receiver, gauge: Gauge) -> None:
    emit(database, 1)
    sink = MemorySink(keeps_order=False)
    with running(database.dsn, (spec("s"), sink)) as harness:
        until(lambda: len(sink.delivered) == 1, seconds=20, what="it comes")
        harness.settled()
    query(
        database,
        "insert into outbox.delivery"
        " (sink, id, shard, state, ordered, due_at, uid, type, payload, content_type, created_at)"
        " select 's', 1000 + n, 0, 'waiting', false, now(), gen_random_uuid(), 'job', '1', 'application/json', now()"
        " from generate_series(1, 60) n returning 1",
    )
    relay = a_relay(database, receiver, 3)
    relay.start()
    more(receiver, 60)
    assert gauge.most == 3
    relay.stop()
