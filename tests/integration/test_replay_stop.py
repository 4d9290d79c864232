"""Replays and the rest of their process: its leases, and its end, at which each client is closed once."""

from __future__ import annotations

import asyncio
from uuid import UUID

from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Verdict
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.replays import start
from tests.support.wait import auntil, becomes

SHORT_LEASE = 3.0


class Counted(MemorySink):
    """A client that counts how often it was opened and closed, and delivers nothing until ``free`` is set."""

    def __init__(self) -> None:
        super().__init__(self.hold, keeps_order=False)
        self.opened = self.closed = 0
        self.free = asyncio.Event()
        self.stopping: asyncio.Event | None = None
        """Set by the opening, as a signal that comes at that time does."""

    def __call__(self, _name: str, _replay: int, _slots: int) -> MemorySink:
        """Return itself, as the client of a replay."""
        return self

    async def hold(self, _event: StoredEvent, _attempt: int) -> Verdict:
        """Wait."""
        await self.free.wait()
        return DELIVERED

    async def open(self) -> None:
        """Count."""
        self.opened += 1
        if self.stopping is not None:
            self.stopping.set()

    async def close(self) -> None:
        """Count."""
        self.closed += 1
        await super().close()


async def begun(harness: RelayHarness, sink: MemorySink, database: Database) -> None:
    """Wait until a replay of events that the sink has passed is served."""
    await delivered(sink, emit(database, [f"k{n}" for n in range(20)]))
    await has(database, "select from outbox_internal.backlog(%s, null, 1000, 5.0) where events = 0", "s")
    start(database, since="PT1H")

    async def served() -> bool:
        return harness.replays is not None and bool(harness.replays.relays)

    await auntil(served, seconds=20, what="the replay is served")


async def test_a_client_is_closed_once_when_the_stop_and_the_round_end_its_replay_together(database: Database) -> None:
    """Goes red when the two do not wait for each other."""
    sink, client = MemorySink(), Counted()
    async with running(database.dsn, (spec("s"), sink), replay_client=client) as harness:
        await begun(harness, sink, database)
        replays = harness.replays
        assert replays is not None
        await becomes(lambda: [len(each.leases.held) for each in replays.relays.values()] == [SHARDS], "it has shards")
        await asyncio.gather(replays.leave(), replays.leave())
        await replays.close()
        assert query(database, "select from outbox.shard where sink = '~1' and owner is not null") == []
        harness.stopping.set()
    assert (client.opened, client.closed) == (1, 1)


async def test_a_client_that_is_open_when_the_stop_begins_is_closed_and_serves_nothing(database: Database) -> None:
    """Goes red when the stop is not looked at again: the stop would neither wait for the replay nor end it."""
    sink, client = MemorySink(), Counted()
    async with running(database.dsn, (spec("s"), sink), replay_client=client) as harness:
        await delivered(sink, emit(database, ["k"]))
        await has(database, "select from outbox_internal.backlog(%s, null, 1000, 5.0) where events = 0", "s")
        client.stopping = harness.stopping
        start(database, since="PT1H")

        async def closed() -> bool:
            return client.closed == 1

        await auntil(closed, seconds=20, what="the client is closed")
        assert harness.replays is not None
        assert harness.replays.relays == {}
    assert (client.opened, client.closed) == (1, 1)


async def test_a_client_is_closed_although_the_database_is_gone_at_the_stop(database: Database) -> None:
    """Goes red when the error ends the stop before the clients are closed."""
    sink, client = MemorySink(), Counted()
    async with running(database.dsn, (spec("s"), sink), replay_client=client) as harness:
        await begun(harness, sink, database)

        async def gone(sink: str, owner: UUID) -> int:
            raise DatabaseUnavailable(f"gone: {sink}, {owner}")

        harness.store.give_rows_back = gone
        assert harness.replays is not None
        harness.stopping.set()
        await harness.replays.leave()
        assert client.closed == 0
        await harness.replays.close()
    assert (client.opened, client.closed) == (1, 1)


async def test_locked_shards_of_a_replay_hold_up_no_lease_of_a_sink(database: Database) -> None:
    """Goes red when one statement renews both."""
    sink, client = MemorySink(), Counted()
    expects = {"lease_lost", "statement_failed"}
    async with running(
        database.dsn, (spec("s"), sink), lease_seconds=SHORT_LEASE, replay_client=client, expects=expects
    ) as harness:
        await begun(harness, sink, database)
        await has(database, "select from outbox.shard where sink = '~1' and owner is not null limit 1")
        with database.connect() as settlement:
            settlement.execute("select from outbox.shard where sink = '~1' for share")
            [(until,)] = query(database, "select max(lease_until) from outbox.shard where sink = '~1'")
            later = "select from outbox.shard where sink = 's' having min(lease_until) > %s + interval '3 seconds'"
            await has(database, later, until)
        assert harness.relays[0].restarts == {}
        harness.stopping.set()
