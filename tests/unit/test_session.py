"""The session of a sink: what wakes its loop, and the fault that readiness shows."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import pytest
import structlog

from outbox_relay.domain.errors import DatabaseUnusable, LeaseLost, PositionsMissing, RelayError, first
from outbox_relay.domain.in_flight import Chunk, InFlight
from outbox_relay.domain.sink_spec import ReplaySpec
from outbox_relay.domain.window import Position, Tick
from outbox_relay.postgres.rows import SinkRow, TickResult
from outbox_relay.postgres.store import Store
from outbox_relay.relay import settler
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.session import Session
from outbox_relay.relay.settler import Settler
from outbox_relay.relay.sink_leases import Lease, SinkLeases
from outbox_relay.relay.sink_registration import SinkRegistration
from outbox_relay.relay.sink_relay import SinkRelay
from outbox_relay.relay.ticker import Ticker
from outbox_relay.sinks.contract.handing import an_event
from tests.support.memory_sink import MemorySink
from tests.support.recording import a_recorder
from tests.support.relay_harness import spec

NO_STORE = cast("Store", None)
"""Nothing is written here."""
START = Position(Tick(0, "3:3:", 3), Tick(9, "12:12:", 12))
ROW = SinkRow("s", 1, paused=False, circuit="closed", in_flight_limit=None, unowned=0, patterns=("*",))


async def test_the_loop_is_woken_when_there_is_room_again_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when the reader is not told: it would read on after a second, or never."""
    monkeypatch.setattr(settler, "MOST_CHUNKS", 2)
    leases, in_flight = SinkLeases("s", 1), InFlight()
    settling = Settler(NO_STORE, leases, UUID(int=1), in_flight, a_recorder())
    in_flight.take_over([0], START)
    chunks = [Chunk([an_event(), an_event()], START, START) for _ in range(2)]
    for chunk in chunks:
        assert settling.has_capacity()
        in_flight.take(in_flight.readable[0], chunk)
    settling.done(chunks[1], 0)
    assert not leases.wake.is_set(), "no reader waits"
    assert not settling.has_capacity()
    settling.done(chunks[0], 0)
    assert not leases.wake.is_set(), "there is no room"
    settling.done(chunks[0], 1)
    assert leases.wake.is_set()
    leases.wake.clear()
    settling.done(chunks[1])
    assert not leases.wake.is_set(), "it was woken once"


async def test_bytes_in_flight_leave_no_room_for_another_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when the bytes are not compared: 64 chunks of large events would be read."""
    size = Chunk([an_event()], START, START).size
    assert size > 0
    monkeypatch.setattr(settler, "MOST_BYTES", 2 * size)
    leases, in_flight = SinkLeases("s", 1), InFlight()
    settling = Settler(NO_STORE, leases, UUID(int=1), in_flight, a_recorder())
    in_flight.take_over([0], START)
    chunks = [Chunk([an_event()], START, START) for _ in range(2)]
    for chunk in chunks:
        assert settling.has_capacity()
        in_flight.take(in_flight.readable[0], chunk)
    assert not settling.has_capacity()
    settling.done(chunks[0])
    assert settling.has_capacity()
    assert leases.wake.is_set(), "the reader is told"


class FailingRelay(SinkRelay):
    """A relay whose sessions end with an error before they begin, or go round the loop once."""

    error: RelayError | None = None
    adopted: RelayError | None = None

    async def _prepare(self) -> Any:
        if self.error:
            raise self.error
        return None

    async def look_at(self, database: Restored, seen_in: str, missing_for: float) -> None:
        """Look once, while the sink has been missing for some time. ``seen_in`` is the incarnation that had it."""
        self.store, self.ticker = cast("Any", database), cast("Any", database)
        registration = SinkRegistration(self.store, self.ticker, self.lease_manager, self.leases)
        registration.began, registration.seen_in = await database.refresh(), seen_in
        registration._missing_since = time.monotonic() - missing_for  # pyright: ignore[reportPrivateUsage]
        self.registration = registration
        await self._register_again(FakeSession(self.stopping).parked)

    async def _run_session(self, tasks: asyncio.TaskGroup, before: Session | None = None) -> None:
        del tasks, before
        await self._prepare()
        self._fault.session_begins()
        if self.adopted:
            raise self.adopted
        session: Any = FakeSession(self.stopping)
        await self._claim_deliver_settle(session)


class FakeSession(Session):
    """A session without parts, whose loop ends after one turn."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self.log_reader = cast("Any", self)
        self.parked = cast("Any", self)
        self.limiter = ConcurrencyLimiter(1, asyncio.Event())
        self.under_way = 0
        self.draining = False
        self._stopping = stopping

    async def adopt(self) -> None:
        """Take over nothing."""

    async def step(self) -> bool:
        """End the loop, though shards are held."""
        raise LeaseLost("the test ends the session")


def a_relay() -> FailingRelay:
    log = structlog.get_logger()
    manager = LeaseManager(NO_STORE, UUID(int=1), "test", "1", 15.0, log)
    leases = manager.add("s", 1)
    return FailingRelay(spec("s"), MemorySink(), NO_STORE, cast("Ticker", None), manager, leases, log, asyncio.Event())


async def session(relay: FailingRelay, error: RelayError | None = None, adopted: RelayError | None = None) -> None:
    """Run a session that ends with ``error`` before it begins, with ``adopted`` as it claims, or after a turn."""
    relay.error, relay.adopted = error, adopted
    with pytest.raises(RelayError):
        await relay.run()


async def test_a_refusal_is_the_fault_until_a_session_begins_even_without_any_shard() -> None:
    """Goes red when a takeover is waited for: a relay with a quota of 0 would stay unready."""
    relay = a_relay()
    await session(relay, DatabaseUnusable("password refused"))
    assert relay.fault == "password refused"
    await session(relay)
    assert relay.fault is None


async def test_missing_positions_are_the_fault_until_those_of_owned_shards_are_known() -> None:
    """Goes red when the next session forgets them as it begins: readiness would flap at each try."""
    relay = a_relay()
    await session(relay, adopted=PositionsMissing("no position"))
    await session(relay)
    await session(relay, LeaseLost("meanwhile"))
    await session(relay, DatabaseUnusable("password refused"))
    assert relay.fault == "no position"
    relay.leases.grant({0: Lease(1, 0.0, 0)})
    await session(relay)
    assert relay.fault is None


async def test_a_removed_sink_is_the_fault_whatever_ends_its_sessions() -> None:
    relay = a_relay()
    relay.leases.remove()
    await session(relay, LeaseLost("a shard was lost"))
    assert (relay.fault or "").startswith("the sink was removed from the database: restart the relay")
    relay.leases.observe(ROW, stopping=False)
    assert relay.fault is None


class Restored:
    """The ticks, and the statement by which a missing sink is registered, of a database that was restored."""

    def __init__(self) -> None:
        self.registered = 0

    async def refresh(self) -> TickResult:
        """Return the first tick of the new incarnation."""
        return TickResult(Tick(1, "3:3:", 3), "restored", datetime.now(UTC), 0)

    async def register_missing_sink(self, *_: object, **_given: object) -> None:
        """Register nothing: another relay has."""
        self.registered += 1


@pytest.mark.parametrize(
    ("change", "registers"),
    [("", True), ("replay", False), ("superseded", False), ("superseded long ago", True), ("same server", False)],
)
async def test_only_a_sink_that_a_restore_took_from_the_newest_configuration_is_registered_again(
    change: str, registers: bool
) -> None:
    """A replay is no sink, and relays that were superseded leave it to the others for two leases."""
    relay, database = a_relay(), Restored()
    if change == "replay":
        relay.spec = replace(relay.spec, replay=ReplaySpec(1))
    relay.leases.superseded = change.startswith("superseded")
    relay.leases.remove()
    seen_in, missing_for = "restored" if change == "same server" else "before", 31 if "long ago" in change else 0
    await relay.look_at(database, seen_in, missing_for)
    assert database.registered == registers


def test_the_unexpected_failure_of_several_is_the_one_that_is_raised() -> None:
    bug, reset = ValueError("a bug"), LeaseLost("a shard was lost")
    assert first(BaseExceptionGroup("", [reset, BaseExceptionGroup("", [reset, bug])])) is bug
    assert first(BaseExceptionGroup("", [reset, DatabaseUnusable("refused")])) is reset
