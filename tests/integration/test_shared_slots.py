"""The requests in flight of all relays together: counted at a receiver while relays join, leave, crash, lose leases."""

from __future__ import annotations

import random
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox_relay.admin.status import status
from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.sink_limits import SinkLimits
from tests.support.database import Database, query
from tests.support.lock_waits import SECONDS, Connection, begun
from tests.support.memory_sink import MemorySink
from tests.support.receiver import Receiver
from tests.support.receiver.gauge import Gauge
from tests.support.relay_config import webhook_config
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.service import RelayService
from tests.support.sink_actions import call
from tests.support.wait import auntil, until
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
    sink_spec = spec("s", claim=claim, ordered=claim == "log", limits=SinkLimits(None, total))
    return RelayHarness(database.dsn, [(sink_spec, a_sink(receiver.url, timeout_seconds=1.0))], **OPTIONS)


async def _is(fact: bool) -> bool:
    return fact


async def more(receiver: Receiver, requests: int) -> None:
    """Wait until further requests have come."""
    wanted = len(receiver.requests) + requests
    await auntil(lambda: _is(len(receiver.requests) >= wanted), seconds=60, what=f"{requests} further requests")


# -- at the receiver -------------------------------------------------------------------------------------------------


async def test_relays_that_join_and_leave_never_have_more_in_flight_together(
    database: Database, receiver: Receiver, gauge: Gauge
) -> None:
    """Goes red when each relay has all slots, or takes those of a relay that has not given them up."""
    emit(database, 600)
    first, second = a_relay(database, receiver, 5), a_relay(database, receiver, 5)
    await first.start()
    await more(receiver, 60)
    assert gauge.most == 5
    await second.start()
    await auntil(lambda: _is(second.store.calls["settle"] > 3), seconds=30, what="the second one delivers")
    found = (await status(first.store))["sinks"]["s"]
    assert (found["max_in_flight_total"], found["at_limit"]) == (5, ["max_in_flight_total"])
    await more(receiver, 60)
    await first.stop()
    assert query(database, "select count(*) from outbox.sink_slot") == [(1,)]
    await second.settled(60)
    assert gauge.most == 5
    await second.stop()
    assert {len(receiver.requests), len({request.uid for request in receiver.requests})} == {600}
    assert query(database, "select count(*) from outbox.sink_slot") == [(0,)]


async def test_one_slot_goes_round_among_relays_that_all_want_it(
    database: Database, receiver: Receiver, gauge: Gauge
) -> None:
    """Goes red when a relay that is never idle keeps the slot: the keys of the others would wait for it."""
    gauge.answer_seconds = 0.01
    emit(database, 2000)
    relays = [a_relay(database, receiver, 1) for _ in range(3)]
    for relay in relays:
        await relay.start()

    async def all_deliver() -> bool:
        return all(relay.lease_manager.held["s"] and relay.store.calls["settle"] > 2 for relay in relays)

    await auntil(all_deliver, seconds=60, what="each relay delivers")
    assert gauge.most == 1
    for relay in relays:
        await relay.crash()


async def test_parked_deliveries_have_slots_too(database: Database, receiver: Receiver, gauge: Gauge) -> None:
    emit(database, 1)
    sink = MemorySink(keeps_order=False)
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await auntil(lambda: _is(len(sink.delivered) == 1), seconds=20, what="it comes")
        await harness.settled()
    query(
        database,
        "insert into outbox.delivery"
        " (sink, id, shard, state, ordered, due_at, uid, type, payload, content_type, created_at)"
        " select 's', 1000 + n, 0, 'waiting', false, now(), gen_random_uuid(), 'job', '1', 'application/json', now()"
        " from generate_series(1, 60) n returning 1",
    )
    relay = a_relay(database, receiver, 3)
    await relay.start()
    await more(receiver, 60)
    assert gauge.most == 3
    await relay.stop()


@pytest.mark.slow
def test_slots_of_a_relay_that_is_killed_are_free_when_its_requests_cannot_be_in_flight(
    database: Database, receiver: Receiver, gauge: Gauge, tmp_path: Path
) -> None:
    """Takes the time of a lease, of a request and a margin. Goes red when slots are free with the shards."""
    settings = "max_in_flight_total = 4\ntimeout_seconds = 2"
    text = webhook_config(database.dsn, receiver, tmp_path)
    text = text.replace('type = "webhook"', f'type = "webhook"\n{settings}')
    gauge.answer_seconds = 1.0
    query(database, "select outbox.emit('a.b', '1', key => n::text) from generate_series(1, 200) n")
    with RelayService(tmp_path, text, "one", expects={"handed_over", "lease_lost"}) as one:
        until(lambda: gauge.now == 4, seconds=30, what="all slots are in use")
        with RelayService(tmp_path, text, "two", expects={"handed_over", "lease_lost"}):
            one.kill()
            [(left,)] = query(
                database, "select max(lease_until) > clock_timestamp() from outbox.sink_slot where slots > 0"
            )
            assert left
            seen = len(receiver.requests)
            until(lambda: len(receiver.requests) >= seen + 8, seconds=60, what="the other relay delivers")
            assert gauge.most == 4


# -- leases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", ["log", "rows"])
async def test_a_relay_whose_slots_have_lapsed_sends_no_new_request(
    database: Database, receiver: Receiver, gauge: Gauge, monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    """The fence: goes red when slots are believed without end. Another relay uses them meanwhile."""
    emit(database, 1000)
    first = a_relay(database, receiver, 4, claim)
    await first.start()
    await more(receiver, 20)

    async def fail(*_: Any) -> Any:
        raise StatementFailed("no answer")

    monkeypatch.setattr(first.store, "tend_slots", fail)
    await auntil(lambda: _is(first.relays[0].limits.slots.free == 0 and gauge.now == 0), seconds=30, what="they lapse")
    sent = len(receiver.requests)
    second = a_relay(database, receiver, 4, claim)
    await second.start()
    await more(receiver, 40)
    assert gauge.most == 4
    assert len(receiver.requests) > sent
    await first.crash()
    await second.crash()


def tend(database: Database, relay: UUID, number: int, wanted: int, kept: int) -> list[tuple[Any, ...]]:
    """Return the slots and the fair share of a relay. All others want theirs still, however slow the machine is."""
    query(
        database,
        "with every as (update outbox.sink_slot set asked_at = clock_timestamp() + interval '9 seconds' returning 1)"
        " select count(*) from every",
    )
    return query(
        database, "select * from outbox_internal.tend_slots('s', %s, %s, %s, %s, 60)", relay, number, wanted, kept
    )


def a_sink_with(database: Database, total: int) -> None:
    """Make a sink by hand."""
    query(
        database,
        "insert into outbox.sink (name, patterns, generation, start, max_in_flight_total)"
        " values ('s', '{*}', 1, 'now', %s) returning 1",
        total,
    )
    query(
        database,
        "insert into outbox.shard (sink, shard, epoch) select 's', n, 1 from generate_series(0, 63) n returning 1",
    )


def test_a_statement_that_arrives_late_has_no_effect(database: Database) -> None:
    """The fence: goes red when it gives up slots that are in use again, or takes some that no relay knows of."""
    a_sink_with(database, 4)
    relay = uuid4()
    assert tend(database, relay, 2, 3, 0) == [(3, 3)]
    assert tend(database, relay, 1, 4, 0) == []
    assert tend(database, relay, 2, 0, 0) == []
    assert query(database, "select slots, wanted from outbox.sink_slot") == [(3, 3)]


def test_slots_are_shared_evenly_and_none_is_taken_from_a_relay_that_uses_it(database: Database) -> None:
    a_sink_with(database, 10)
    three, one, two = sorted(uuid4() for _ in range(3))  # what cannot be shared evenly goes to the last
    assert tend(database, one, 1, 64, 0) == [(10, 10)]
    assert tend(database, two, 1, 64, 0) == [(0, 5)]
    assert tend(database, one, 2, 64, 10) == [(10, 5)]
    assert tend(database, one, 3, 64, 7) == [(7, 5)]
    assert tend(database, two, 2, 64, 0) == [(3, 5)]
    assert tend(database, one, 4, 64, 5) == [(5, 5)]
    assert tend(database, two, 3, 64, 3) == [(5, 5)]
    assert tend(database, three, 1, 2, 0) == [(0, 2)]
    assert tend(database, one, 5, 64, 4) == [(4, 4)]
    assert tend(database, three, 2, 2, 0) == [(1, 2)]
    query(database, "update outbox.sink_slot set lease_until = '-infinity' where relay = %s returning 1", two)
    assert tend(database, three, 3, 64, 1) == [(3, 3)]


def test_relays_that_ask_at_the_same_time_never_have_more_than_all_slots(database: Database) -> None:
    """Goes red when the sum is made without the lock."""
    a_sink_with(database, 7)
    connections = [database.connect(autocommit=True) for _ in range(4)]

    def work(place: int) -> int:
        chance, relay, slots, most = random.Random(place), uuid4(), 0, 0
        for number in range(60):
            kept = chance.randint(0, slots)
            [(slots, _)] = connections[place].execute(
                "select * from outbox_internal.tend_slots('s', %s, %s, %s, %s, 60)",
                (relay, number, chance.randint(0, 9), kept),
            )
            assert slots >= kept
            [(total,)] = connections[place].execute(
                "select sum(slots) from outbox.sink_slot where lease_until > clock_timestamp()"
            )
            most = max(most, total)
        return most

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(work, range(4))) == 7
    for connection in connections:
        connection.close()


def tend_in(connection: Connection) -> list[tuple[Any, ...]]:
    """Tend the slots of a second relay, by the first name of the sink."""
    return connection.execute(
        "select slots from outbox_internal.tend_slots('s', '00000000-0000-0000-0000-000000000002', 1, 9, 0, 60)"
    ).fetchall()


def test_slots_are_those_of_the_total_after_the_lock(database: Database) -> None:
    """The fence: goes red when the total is read before the lock on the row, and may have been lowered since."""
    a_sink_with(database, 8)
    tend(database, uuid4(), 1, 2, 0)
    with database.connect() as connection:
        connection.execute("select from outbox.sink_limit for update")
        with begun(database, tend_in) as tended:
            connection.execute("update outbox.sink set max_in_flight_total = 3")
            connection.commit()
            assert tended.result(SECONDS) == [(1,)]


@pytest.mark.parametrize("known", [True, False], ids=["row", "no-row"])
def test_a_renamed_sink_has_no_slots_under_its_first_name(database: Database, known: bool) -> None:
    """The fence: goes red when slots are made again after the rename, for the name that a relay still uses."""
    a_sink_with(database, 4)
    if known:
        tend(database, uuid4(), 1, 4, 0)
    with database.connect() as connection:
        connection.execute("select outbox.rename_sink('s', 'crm', 'tester', null)")
        with begun(database, tend_in) as tended:
            connection.commit()
            assert tended.result(SECONDS) == []
    assert query(database, "select sink, slots from outbox.sink_slot") == [("crm", 4)] * known


@pytest.mark.parametrize("asks", ["holder", "waiter"])
def test_a_clock_that_is_set_back_keeps_no_slot_from_the_relays_that_wait(database: Database, asks: str) -> None:
    """The fence: goes red when the turn of a relay, or the lease of a dead one, lasts until that time comes again."""
    a_sink_with(database, 2)
    dead, holder, waiter = (uuid4() for _ in range(3))
    numbers = iter(range(1, 100))

    def ask(relay: UUID, kept: int) -> tuple[int, int]:
        [answer] = query(
            database, "select * from outbox_internal.tend_slots('s', %s, %s, 1, %s, 60)", relay, next(numbers), kept
        )
        return answer

    assert [ask(relay, 0)[0] for relay in (dead, holder, waiter)] == [1, 1, 0]
    query(
        database,
        "update outbox.sink_slot set asked_at = asked_at + interval '1 hour',"
        " lease_until = lease_until + interval '1 hour',"
        " turn_at = turn_at + interval '1 hour', served_at = clock_timestamp() + interval '1 hour' returning 1",
    )
    ask(*((holder, 1) if asks == "holder" else (waiter, 0)))
    query(database, "update outbox.sink_slot set turn_at = turn_at - interval '1 second' where slots > 0 returning 1")
    query(database, "update outbox.sink_slot set asked_at = '-infinity' where relay = %s returning 1", dead)
    [(left,)] = query(
        database,
        "select extract(epoch from lease_until - clock_timestamp())::float8 from outbox.sink_slot where relay = %s",
        dead,
    )
    assert 50 < left <= 60
    query(database, "update outbox.sink set max_in_flight_total = 1 returning 1")
    ask(waiter, 0)
    ask(holder, 1)
    assert ask(holder, 1) == (1, 0)  # it is the other one's turn
    ask(holder, 0)
    query(database, "update outbox.sink_slot set lease_until = now() where relay = %s returning 1", dead)
    assert ask(waiter, 0) == (1, 1)


async def test_slots_follow_a_sink_that_is_renamed_and_go_with_one_that_is_removed(database: Database) -> None:
    a_sink_with(database, 4)
    relay = uuid4()
    tend(database, relay, 1, 3, 0)
    call(database, "select outbox.rename_sink('s', 'crm', 'tester', null)")
    assert query(database, "select sink, slots from outbox.sink_slot") == [("crm", 3)]
    assert query(database, "select max_in_flight_total from outbox.sink") == [(4,)]
    call(database, "select * from outbox.drop_sink('crm', false, 100, 'tester', null, null)")
    assert query(database, "select count(*) from outbox.sink_slot") == [(0,)]


def test_a_relay_that_has_left_has_only_slots_that_its_requests_may_use(database: Database) -> None:
    """The fence: goes red when a relay that seems to be dead loses slots before their leases end."""
    a_sink_with(database, 4)
    frozen, left = uuid4(), uuid4()

    def forget(relay: UUID) -> None:
        query(
            database,
            "insert into outbox.relay (id, name, version, sinks) values (%s, 'r', '1', '{s}') returning 1",
            relay,
        )
        query(database, "delete from outbox.relay returning 1")

    assert tend(database, frozen, 1, 3, 0) == [(3, 3)]
    assert tend(database, left, 1, 3, 0) == [(1, 2)]
    tend(database, left, 2, 0, 0)
    forget(frozen)
    assert query(database, "select relay, slots from outbox.sink_slot") == [(frozen, 3)]
    assert tend(database, left, 3, 4, 0) == [(1, 2)]
    query(database, "update outbox.sink_slot set lease_until = now() where relay = %s returning 1", frozen)
    forget(left)
    assert query(database, "select relay from outbox.sink_slot") == [(left,)]
