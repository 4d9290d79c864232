"""The requests per second of all relays together: counted at a receiver, over a time of the database's clock."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_relay.admin.status import status
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from tests.support.database import Database, query
from tests.support.deliveries import has
from tests.support.memory_sink import MemorySink
from tests.support.rates import BURST, RATE, holds
from tests.support.receiver import Receiver
from tests.support.relay_harness import RelayHarness, owns, running, spec
from tests.support.replays import Clients, start
from tests.support.wait import until
from tests.support.webhook_sink import a_sink


def emit(database: Database, events: int) -> None:
    """Emit events of many keys in one transaction."""
    query(database, f"select outbox.emit('job', '1', key => n::text) from generate_series(1, {events}) n")


def limited(rate: float = RATE, **changes: Any) -> Any:
    """Return the specification of a sink with a rate."""
    return spec("s", rate_per_second=rate, **changes)


# -- one relay and several --------------------------------------------------------------------------------------------


def test_relays_that_join_and_leave_keep_the_rate_together(database: Database) -> None:
    """Goes red without the limiter, and with a rate for each relay: two of them would send twice as many."""
    emit(database, 1500)
    with Receiver() as receiver:
        first, second = (
            RelayHarness(database.dsn, [(limited(), a_sink(receiver.url))], lease_seconds=3.0, expects={"handed_over"})
            for _ in range(2)
        )
        first.start()
        until(lambda: len(receiver.requests) > BURST, seconds=30, what="events flow")
        holds(database, lambda: len(receiver.requests))
        second.start()
        owns(second, 32)
        holds(database, lambda: len(receiver.requests))
        first.stop()
        owns(second, 64)
        assert len(receiver.requests) <= RATE * 60
        second.stop()
    assert len({request.uid for request in receiver.requests}) == len(receiver.requests)


# -- everything that is sent ------------------------------------------------------------------------------------------


@pytest.mark.fence("a relay with a limit stops while a replay waits for it")
def test_a_replay_that_waits_does_not_hold_up_a_stop(database: Database) -> None:
    """Goes red when the events in hand of a replay are drained at the rate of its target, which does not end here."""
    emit(database, 20)
    sink, clients = MemorySink(keeps_order=False), Clients(lambda: lambda _event, _attempt: DELIVERED)
    parts = (spec("s"), sink)
    with running(database.dsn, parts, replay_client=clients, expects={"handed_over"}) as harness:
        until(lambda: len(sink.delivered) == 20, seconds=20, what="all come")
        has(database, "select from outbox_internal.backlog(%s, null, 1000, 5.0) where events = 0", "s")
        _register(harness, SinkLimits(0.01))
        until(lambda: harness.loops[0].limits.active, seconds=10, what="it is known")
        start(database, since="2000-01-01T00:00:00Z")
        until(lambda: harness.loops[0].limits.waiting > 1, seconds=30, what="the replay waits")
        harness.stop()
        assert _replayed(clients) <= 1


def _replayed(clients: Clients) -> int:
    return sum(len(sink.delivered) for _, _, sink in clients.made)


# -- the database and the configuration -------------------------------------------------------------------------------


def test_the_newest_configuration_is_in_force_on_every_relay_without_a_new_session(database: Database) -> None:
    """Goes red when a relay obeys its own file, or when a changed limit ends a session."""
    emit(database, 3000)
    sink = MemorySink(keeps_order=False)
    with running(database.dsn, (limited(5.0), sink)) as harness:
        harness.owns_all()
        session = harness.loops[0].session
        _register(harness, SinkLimits(300.0))
        until(lambda: harness.leases("s").limits.rate_per_second == 300, seconds=10, what="it is known")
        until(lambda: len(sink.delivered) > 200, seconds=30, what="events flow faster")
        found = status(harness.store)
        assert found["sinks"]["s"]["rate_per_second"] == 300
        _register(harness, NO_LIMITS)
        until(lambda: len(sink.delivered) == 3000, seconds=30, what="all come")
        harness.settled()
        assert harness.loops[0].session is session
        assert (status(harness.store))["sinks"]["s"]["rate_per_second"] is None


def _register(harness: RelayHarness, limits: SinkLimits) -> None:
    harness.store.state_limits({"s": limits})
