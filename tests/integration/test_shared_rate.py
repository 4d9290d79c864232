"""The requests per second of all relays together: counted at a receiver, over a time of the database's clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from psycopg.errors import CheckViolation

from outbox_relay.admin.status import status
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable, Verdict
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.relay import shared_rate
from tests.support.database import Database, query
from tests.support.deliveries import has
from tests.support.lock_waits import SECONDS, Connection, begun
from tests.support.memory_sink import BOTH, MemorySink
from tests.support.rates import BURST, RATE, counted, flow, holds
from tests.support.receiver import Receiver
from tests.support.relay_harness import RelayHarness, owns, running, spec
from tests.support.replays import Clients, start
from tests.support.wait import auntil
from tests.support.webhook_sink import a_sink

ONE_KEY, MANY_KEYS = "'k'", "n::text"


def emit(database: Database, events: int, key: str = MANY_KEYS) -> None:
    """Emit events in one transaction."""
    query(database, f"select outbox.emit('job', '1', key => {key}) from generate_series(1, {events}) n")


def limited(rate: float = RATE, **changes: Any) -> Any:
    """Return the specification of a sink with a rate."""
    return spec("s", limits=SinkLimits(rate), **changes)


# -- one relay and several --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [pytest.param(ONE_KEY, marks=pytest.mark.slow), MANY_KEYS])
async def test_relays_that_join_and_leave_keep_the_rate_together(database: Database, key: str) -> None:
    """Goes red without the limiter, and with a rate for each relay: two of them would send twice as many."""
    emit(database, 1500, key)
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


async def test_a_replay_that_waits_does_not_hold_up_a_stop_after_its_target_has_ended(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when the limits end with the session of the target: the turn of the replay is never served."""
    emit(database, 20)
    sink, clients = MemorySink(keeps_order=False), Clients(lambda: lambda _event, _attempt: DELIVERED)
    async with running(database.dsn, (limited(), sink), replay_client=clients) as harness:
        await auntil(lambda: _is(len(sink.delivered) == 20), seconds=20, what="all come")
        await has(database, "select from outbox_internal.backlog(%s, null, 1000, 5.0) where events = 0", "s")
        take = harness.store.take_tokens

        async def fail(*_: Any) -> Any:
            raise StatementFailed("no answer")

        monkeypatch.setattr(harness.store, "take_tokens", fail)
        start(database, since="2000-01-01T00:00:00Z")
        await auntil(lambda: _is(harness.relays[0].limits.waiting > 0), seconds=30, what="the replay waits")
        monkeypatch.setattr(shared_rate, "STARVED_SECONDS", 1e9)
        harness.stopping.set()
        await harness.lease_manager.stop()
        await asyncio.wait_for(asyncio.shield(harness.tasks[2]), 20)
        monkeypatch.setattr(harness.store, "take_tokens", take)
        await harness.stop()
        assert _replayed(clients) > 0


def _replayed(clients: Clients) -> int:
    return sum(len(sink.delivered) for _, _, sink in clients.made)


# -- what it costs ----------------------------------------------------------------------------------------------------


async def test_a_sink_without_limits_and_an_idle_one_with_them_cost_no_statement(database: Database) -> None:
    emit(database, 100)
    sink = MemorySink(keeps_order=False)
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await auntil(lambda: _is(len(sink.delivered) == 100), seconds=20, what="all come")
        await harness.stop()  # which writes all positions
        assert {"take_tokens", "tend_slots"} & harness.store.calls.keys() == set()
    limits = SinkLimits(1000.0, 10)
    async with running(database.dsn, (spec("s", limits=limits), MemorySink(keeps_order=False))) as harness:
        await harness.owns_all()
        claims = harness.store.calls["claim_rows"]
        await auntil(
            lambda: _is(harness.store.calls["claim_rows"] > claims + 2), seconds=20, what="rows are looked for"
        )
        assert {"take_tokens", "tend_slots"} & harness.store.calls.keys() == set()


async def test_many_events_cost_few_statements(database: Database) -> None:
    emit(database, 600)
    sink = MemorySink(keeps_order=False)
    async with running(database.dsn, (limited(2000.0), sink)) as harness:
        await auntil(lambda: _is(len(sink.delivered) == 600), seconds=20, what="all come")
        await harness.settled()
    assert 0 < harness.store.calls["take_tokens"] <= 60


# -- the database and the configuration -------------------------------------------------------------------------------


async def test_nothing_is_sent_while_tokens_cannot_be_taken(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = MemorySink(keeps_order=False)
    async with running(database.dsn, (limited(), sink)) as harness:
        take, asked = harness.store.take_tokens, list[int]()

        async def fail(*values: Any) -> Any:
            asked.append(values[1])
            raise StatementFailed("no answer")

        monkeypatch.setattr(harness.store, "take_tokens", fail)
        emit(database, 10)
        await auntil(lambda: _is(len(asked) > 3), seconds=20, what="it is asked again")
        assert sink.delivered == []
        monkeypatch.setattr(harness.store, "take_tokens", take)
        await harness.settled()


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
        assert found["sinks"]["s"]["at_limit"] == ["rate_per_second"]
        await _register(harness, NO_LIMITS)
        await auntil(lambda: _is(len(sink.delivered) == 3000), seconds=30, what="all come")
        await harness.settled()
        assert harness.relays[0].session is session
        assert (await status(harness.store))["sinks"]["s"]["rate_per_second"] is None
    # A relay made for an earlier version states no limits, and changes none.
    query(database, "update outbox.sink set rate_per_second = 7 returning 1")
    async with running(database.dsn) as harness:
        await harness.store.register_sinks([("s", ("*",), None)], (await harness.ticker.refresh()).tick)
    assert query(database, "select rate_per_second from outbox.sink") == [(7.0,)]


async def _register(harness: RelayHarness, limits: SinkLimits) -> None:
    assert await harness.store.state_limits({"s": limits}) == {}


async def test_limits_of_one_sink_that_are_refused_change_no_other(database: Database) -> None:
    """Goes red when one of them fails the registration of all, or when a limit is out of the bounds of the file."""
    async with running(database.dsn) as harness:
        tick = (await harness.ticker.refresh()).tick
        await harness.store.register_sinks([(name, ("*",), None) for name in "abcd"], tick)
        bad = {"a": SinkLimits(1e308), "b": SinkLimits(None, 1 << 40), "c": SinkLimits(None, None, 1e300)}
        refused = await harness.store.state_limits({**bad, "d": SinkLimits(5.0, 6, 7.0)})
    assert refused == {
        "a": "rate_per_second of sink 'a' must be 0.01 to 100000",
        "b": "limits of sink 'b' must be numbers",
        "c": "spread_seconds of sink 'c' must be above 0, up to 86400",
    }
    limits = "select rate_per_second, max_in_flight_total, spread_seconds from outbox.sink order by name"
    assert query(database, limits) == [(None, None, None)] * 3 + [(5, 6, 7)]


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


def take_in(connection: Connection) -> list[tuple[Any, ...]]:
    """Take tokens of the sink by its first name."""
    return connection.execute("select taken, remaining from outbox_internal.take_tokens('s', 100, 0)").fetchall()


def test_tokens_are_those_of_the_rate_after_the_lock(database: Database) -> None:
    """The fence: goes red when the rate is read before the lock on the row, and may have been lowered since."""
    a_sink_with(database, 1000.0)
    query(database, "select * from outbox_internal.take_tokens('s', 1, 0)")
    with database.connect() as connection:
        connection.execute("update outbox.sink_limit set at = at - interval '1 hour'")
        with begun(database, take_in) as taken:
            connection.execute("update outbox.sink set rate_per_second = 4")
            connection.commit()
            assert taken.result(SECONDS) == [(3, 0.0)]


@pytest.mark.parametrize("known", [True, False], ids=["row", "no-row"])
def test_a_renamed_sink_has_no_tokens_under_its_first_name(database: Database, known: bool) -> None:
    """The fence: goes red when the row is made again after the rename, for the name that a relay still uses."""
    a_sink_with(database, 1000.0)
    if known:
        query(database, "select * from outbox_internal.take_tokens('s', 1, 0)")
    with database.connect() as connection:
        connection.execute("select outbox.rename_sink('s', 'crm', 'tester', null)")
        with begun(database, take_in) as taken:
            connection.commit()
            assert taken.result(SECONDS) == []
    assert query(database, "select count(*) from outbox.sink_limit") == [(0,)]


def test_tokens_are_kept_for_half_a_second_and_clocks_that_go_back_cost_little(database: Database) -> None:
    with database.connect(autocommit=True) as connection:
        connection.execute(
            "insert into outbox.sink (name, patterns, generation, start, rate_per_second)"
            " values ('s', '{*}', 1, 'now', 10)"
        )

        def take(wanted: int, unused: int = 0) -> tuple[Any, ...]:
            [row] = connection.execute(
                "select taken, remaining from outbox_internal.take_tokens('s', %s, %s)", (wanted, unused)
            )
            return row

        assert take(5)[0] == 0
        connection.execute("update outbox.sink_limit set at = at - interval '1 hour'")
        taken, remaining = take(3)
        assert (taken, 3.0 <= remaining <= 3.1) == (3, True)
        assert take(0, 100)[1] == 6.0
        connection.execute("update outbox.sink_limit set tokens = 0, at = clock_timestamp() + interval '1 hour'")
        assert take(1)[0] == 0
        [(behind,)] = connection.execute("select clock_timestamp() - at < interval '1 minute' from outbox.sink_limit")
        assert behind
        assert connection.execute("select * from outbox_internal.take_tokens('other', 1, 0)").fetchall() == []


async def _is(fact: bool) -> bool:
    return fact
