"""The requests per second of all relays together: counted at a receiver, over a time of the database's clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from psycopg.errors import CheckViolation

from outbox_relay.admin.status import status
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable, Verdict
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from tests.support.database import Database, query
from tests.support.deliveries import has
from tests.support.memory_sink import BOTH, MemorySink
from tests.support.rates import BURST, RATE, counted, flow, holds
from tests.support.receiver import Receiver
from tests.support.relay_harness import RelayHarness, owns, running, spec
from tests.support.replays import Clients, start
from tests.support.wait import auntil
from tests.support.webhook_sink import a_sink


def emit(database: Database, events: int) -> None:
    """Emit events of many keys in one transaction."""
    query(database, f"select outbox.emit('job', '1', key => n::text) from generate_series(1, {events}) n")


def limited(rate: float = RATE, **changes: Any) -> Any:
    """Return the specification of a sink with a rate."""
    return spec("s", limits=SinkLimits(rate), **changes)


# -- one relay and several --------------------------------------------------------------------------------------------


async def test_relays_that_join_and_leave_keep_the_rate_together(database: Database) -> None:
    """Goes red without the limiter, and with a rate for each relay: two of them would send twice as many."""
    emit(database, 1500)
    with Receiver() as receiver:
        first, second = (
            RelayHarness(database.dsn, [(limited(), a_sink(receiver.url))], lease_seconds=3.0, expects={"handed_over"})
            for _ in range(2)
        )
        await first.start()
        await auntil(lambda: _is(len(receiver.requests) > BURST), seconds=30, what="events flow")
        await holds(database, lambda: len(receiver.requests))
        await second.start()
        await owns(second, 32)
        await holds(database, lambda: len(receiver.requests))
        await first.stop()
        await owns(second, 64)
        assert len(receiver.requests) <= RATE * 60
        await second.stop()
    assert len({request.uid for request in receiver.requests}) == len(receiver.requests)


@BOTH
async def test_four_relays_keep_the_rate_of_batches_and_of_requests(database: Database, keeps_order: bool) -> None:
    emit(database, 3000)
    sinks = [MemorySink(keeps_order=keeps_order) for _ in range(4)]
    relays = [
        RelayHarness(database.dsn, [(limited(), sink)], lease_seconds=3.0, expects={"handed_over"}) for sink in sinks
    ]
    for relay in relays:
        await relay.start()
    for relay in relays:
        await owns(relay, 16)
    await holds(database, lambda: sum(len(sink.delivered) for sink in sinks))
    for relay in relays:
        await relay.crash()


async def test_a_relay_that_joins_gets_its_shards_although_the_events_in_flight_would_take_long(
    database: Database,
) -> None:
    """Goes red when the shards are drained first, which takes five minutes here."""
    emit(database, 600)
    options: Any = {"lease_seconds": 3.0, "expects": {"handed_over"}}
    async with running(database.dsn, (limited(2.0), MemorySink(keeps_order=False)), **options) as first:
        await first.owns_all()
        async with running(database.dsn, (limited(2.0), MemorySink(keeps_order=False)), **options) as second:
            await owns(second, 32)


# -- everything that is sent ------------------------------------------------------------------------------------------


async def test_repeats_spend_tokens_too(database: Database) -> None:
    """Goes red when parked deliveries pass the limiter by: half of the attempts are theirs."""

    def half(event: StoredEvent, attempt: int) -> Verdict:
        return DELIVERED if event.id % 2 else Failed(f"attempt {attempt}")

    emit(database, 3000)
    sink = MemorySink(half, keeps_order=False)
    async with running(database.dsn, (limited(circuit=CircuitPolicy(open_after=100_000)), sink)):
        await flow(lambda: len(sink.attempts) - len(set(sink.attempts)), 5)
        await holds(database, lambda: len(sink.attempts))


async def test_probes_spend_tokens_too(database: Database) -> None:
    def down(_event: StoredEvent, _attempt: int) -> Verdict:
        return Unavailable("down")

    emit(database, 50)
    sink = MemorySink(down, keeps_order=True)
    circuit = CircuitPolicy(open_after=1, probe_seconds=0.001, probe_max_seconds=0.001)
    async with running(database.dsn, (limited(10.0, circuit=circuit), sink)):
        await auntil(lambda: _is(len(sink.attempts) > 8), seconds=30, what="probes are sent")
        count, seconds = await counted(database, lambda: len(sink.attempts))
        assert 0 < count <= 10 * (seconds + 0.6) + 2


@pytest.mark.slow  # measures rates
async def test_a_replay_spends_the_tokens_of_its_target(database: Database) -> None:
    emit(database, 2000)
    sink = MemorySink(keeps_order=False)
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await auntil(lambda: _is(len(sink.delivered) == 2000), seconds=30, what="all come")
        await harness.stop()  # which writes all positions: a replay delivers what they cover
    clients = Clients(lambda: lambda _event, _attempt: DELIVERED, keeps_order=False)
    async with running(database.dsn, (limited(), MemorySink(keeps_order=False)), replay_client=clients):
        start(database, since="2000-01-01T00:00:00Z")
        await flow(lambda: _replayed(clients))
        await holds(database, lambda: _replayed(clients), least=0.1)


async def test_a_replay_that_waits_does_not_hold_up_a_stop(database: Database) -> None:
    """Goes red when the events in hand of a replay are drained at the rate of its target, which does not end here."""
    emit(database, 20)
    sink, clients = MemorySink(keeps_order=False), Clients(lambda: lambda _event, _attempt: DELIVERED)
    parts = (spec("s"), sink)
    async with running(database.dsn, parts, replay_client=clients, expects={"handed_over"}) as harness:
        await auntil(lambda: _is(len(sink.delivered) == 20), seconds=20, what="all come")
        await has(database, "select from outbox_internal.backlog(%s, null, 1000, 5.0) where events = 0", "s")
        await _register(harness, SinkLimits(0.01))
        await auntil(lambda: _is(harness.relays[0].limits.active), seconds=10, what="it is known")
        start(database, since="2000-01-01T00:00:00Z")
        await auntil(lambda: _is(harness.relays[0].limits.waiting > 1), seconds=30, what="the replay waits")
        await asyncio.wait_for(harness.stop(), 20)
        assert _replayed(clients) <= 1


def _replayed(clients: Clients) -> int:
    return sum(len(sink.delivered) for _, _, sink in clients.made)


# -- the database and the configuration -------------------------------------------------------------------------------


async def test_the_newest_configuration_is_in_force_on_every_relay_without_a_new_session(database: Database) -> None:
    """Goes red when a relay obeys its own file, or when a changed limit ends a session."""
    emit(database, 3000)
    sink = MemorySink(keeps_order=False)
    async with running(database.dsn, (limited(5.0), sink)) as harness:
        await harness.owns_all()
        session = harness.relays[0].session
        await _register(harness, SinkLimits(300.0))
        await auntil(lambda: _is(harness.leases("s").limits.rate_per_second == 300), seconds=10, what="it is known")
        await auntil(lambda: _is(len(sink.delivered) > 200), seconds=30, what="events flow faster")
        found = await status(harness.store)
        assert found["sinks"]["s"]["rate_per_second"] == 300
        await _register(harness, NO_LIMITS)
        await auntil(lambda: _is(len(sink.delivered) == 3000), seconds=30, what="all come")
        await harness.settled()
        assert harness.relays[0].session is session
        assert (await status(harness.store))["sinks"]["s"]["rate_per_second"] is None


async def _register(harness: RelayHarness, limits: SinkLimits) -> None:
    await harness.store.state_limits({"s": limits})


@pytest.mark.parametrize(
    "change",
    ["rate_per_second = 1e308", "rate_per_second = 'NaN'", "rate_per_second = 0.001", "max_in_flight_total = 0",
     "max_in_flight_total = 100001", "spread_seconds = 1e300", "spread_seconds = 'NaN'", "spread_seconds = 0"],
)  # fmt: skip
def test_the_table_refuses_limits_that_a_file_cannot_have(database: Database, change: str) -> None:
    """Goes red without the constraints: a spread of 1e300 would break `why` of every sink."""
    a_sink_with(database, 10.0)
    with pytest.raises(CheckViolation):
        query(database, f"update outbox.sink set {change} returning 1")
    unchecked = "select conname from pg_constraint where conrelid = 'outbox.sink'::regclass and not convalidated"
    assert query(database, unchecked) == []


def a_sink_with(database: Database, rate: float) -> None:
    """Make a sink by hand."""
    query(
        database,
        "insert into outbox.sink (name, patterns, generation, start, rate_per_second)"
        " values ('s', '{*}', 1, 'now', %s) returning 1",
        rate,
    )
    query(
        database,
        "insert into outbox.shard (sink, shard, epoch) select 's', n, 1 from generate_series(0, 63) n returning 1",
    )


async def _is(fact: bool) -> bool:
    return fact
