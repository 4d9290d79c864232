"""Writes that fail: tried again, smaller where their size may be the reason, and given up in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.errors import DatabaseUnavailable, SessionReset, StatementFailed
from outbox_relay.domain.in_flight import Chunk, InFlight
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Unavailable
from outbox_relay.domain.window import Position, Tick
from outbox_relay.postgres.rows import NewRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.portions import MOST_TRIES, write_in_portions
from outbox_relay.relay.settler import MOST_EVENTS, MOST_RECORDED, Settler
from outbox_relay.relay.sink_leases import Lease, SinkLeases
from outbox_relay.sinks.contract.handing import an_event
from tests.support.recording import a_recorder

TIMEOUT, DEADLOCK = "57014", "40P01"
NOWHERE = Position(Tick(0, "3:3:", 3), Tick(10**9, "9:9:", 9), 0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tries follow each other without pauses."""
    monkeypatch.setattr("outbox_relay.relay.portions.FIRST_PAUSE_SECONDS", 0.0)


class Writes:
    """A write of ``left`` rows; its tries fail with the states in ``failures``, one after another."""

    def __init__(self, left: int, failures: list[str]) -> None:
        self.left, self.failures, self.asked = left, failures, list[int]()

    async def __call__(self, most: int) -> bool:
        self.asked.append(most)
        if self.failures:
            raise StatementFailed("the database ended the statement", self.failures.pop(0))
        self.left -= min(most, self.left)
        return self.left > 0


async def test_portions_that_run_out_of_time_get_smaller_down_to_one_row() -> None:
    writes = Writes(MOST_EVENTS, [TIMEOUT] * MOST_TRIES)
    with pytest.raises(StatementFailed):
        await write_in_portions(MOST_EVENTS, writes)
    assert (writes.asked[0], writes.asked[-1], len(writes.asked)) == (MOST_EVENTS, 1, MOST_TRIES)
    assert writes.left == MOST_EVENTS


async def test_portion_after_a_deadlock_is_as_large() -> None:
    writes = Writes(100, [DEADLOCK] * (MOST_TRIES - 1))
    await write_in_portions(100, writes)
    assert (writes.left, writes.asked) == (0, [100] * MOST_TRIES)


async def test_what_is_left_follows_in_portions_of_the_size_that_succeeded() -> None:
    writes = Writes(20, [TIMEOUT])
    await write_in_portions(64, writes)
    assert writes.asked == [64, 8, 8, 8]


class Settlements:
    """A store that takes settlements of at most ``largest`` rows and records, and notes their sizes."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.written: list[tuple[int, int, bool]] = []
        """Rows, records, and whether the positions came with them."""

    async def settle(
        self,
        _sink: str,
        _owner: UUID,
        positions: Mapping[int, Any],
        rows: Sequence[NewRow],
        _epochs: Mapping[int, int],
        *,
        records: Sequence[AttemptRecord],
        relay: str | None,
        server: str | None,
    ) -> None:
        assert (relay, server) == ("here" if records else None, "server")
        if len(rows) + len(records) > self.largest:
            raise StatementFailed("canceling statement due to statement timeout", TIMEOUT)
        self.written.append((len(rows), len(records), bool(positions)))


def a_settler(store: Settlements) -> tuple[Settler, SinkLeases, InFlight]:
    """Return a settler of a sink whose shards are owned."""
    leases, in_flight = SinkLeases("s", 1), InFlight()
    leases.grant(dict.fromkeys(range(64), Lease(1, lease_clock() + 60, 0)))
    in_flight.take_over(range(64), NOWHERE)
    return Settler(cast("Store", store), leases, UUID(int=1), in_flight, a_recorder(), "server"), leases, in_flight


def read(in_flight: InFlight, count: int) -> Chunk:
    """Return a chunk of ``count`` events that was read."""
    events = [an_event() for _ in range(count)]
    chunk = Chunk(events, NOWHERE, NOWHERE.at(events[-1].id))
    in_flight.take(in_flight.readable[0], chunk)
    return chunk


async def test_a_settlement_that_is_too_large_is_written_in_parts_rows_then_records_and_positions_last() -> None:
    store = Settlements(5)
    settler, _, in_flight = a_settler(store)
    chunk = read(in_flight, 40)
    for index, event in enumerate(chunk.events[:8]):
        settler.park(chunk, index, NewRow(event.id, 0, "waiting", False), blocks=False)
    settler.record(chunk.events[8:], [DELIVERED] * 32)
    for index in range(8, 40):
        settler.done(chunk, index)
    await settler.flush()
    assert store.written == [(5, 0, False), (3, 2, False), *[(0, 5, False)] * 5, (0, 5, True)]


async def test_only_deliveries_are_recorded_and_without_records_a_settlement_has_none() -> None:
    store = Settlements(5)
    settler, _, in_flight = a_settler(store)
    chunk = read(in_flight, 2)
    settler.record(chunk.events, [Unavailable("down"), DELIVERED])
    settler.done(chunk)
    await settler.flush()
    chunk = read(in_flight, 2)
    settler.done(chunk)
    await settler.flush()
    assert store.written == [(0, 1, True), (0, 0, True)]


async def test_nothing_is_read_while_many_deliveries_are_to_be_recorded() -> None:
    store = Settlements(MOST_RECORDED)
    settler, leases, in_flight = a_settler(store)
    leases.wake.clear()
    chunk = read(in_flight, 1)
    settler.record([chunk.events[0]] * MOST_EVENTS, [DELIVERED] * MOST_EVENTS)
    settler.done(chunk)
    assert not settler.has_capacity()
    assert not leases.wake.is_set()
    await settler.flush()
    assert leases.wake.is_set()
    assert settler.has_capacity()
    assert store.written == [(0, MOST_RECORDED, False)] * 4 + [(0, MOST_RECORDED, True)]


async def test_positions_of_rows_are_written_between_two_settlements() -> None:
    """A settlement of the position before them would otherwise count as the newer one."""
    store = Settlements(5)
    settler, _, in_flight = a_settler(store)
    [group] = in_flight.readable
    written, go_on = asyncio.Event(), asyncio.Event()

    async def write() -> dict[int, Position]:
        written.set()
        await go_on.wait()
        in_flight.take(group, Chunk((), NOWHERE, NOWHERE.at(7)))
        return dict.fromkeys(range(64), NOWHERE.at(7))

    parking = asyncio.create_task(settler.write_alone(write))
    await written.wait()
    forwarding = asyncio.create_task(settler.flush(everything=True))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(parking, forwarding)
    assert store.written == []


async def test_nothing_is_settled_behind_rows_whose_outcome_is_unknown() -> None:
    settler, _, _ = a_settler(Settlements(5))

    async def refused() -> dict[int, Position]:
        raise StatementFailed("canceling statement due to statement timeout", TIMEOUT)

    async def unknown() -> dict[int, Position]:
        raise DatabaseUnavailable("no answer")

    with pytest.raises(StatementFailed):
        await settler.write_alone(refused)
    with pytest.raises(DatabaseUnavailable):
        await settler.write_alone(unknown)
    with pytest.raises(SessionReset):
        await settler.flush()
