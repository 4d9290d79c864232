"""Replays and the leases of their process."""

from __future__ import annotations

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Verdict
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has
from tests.support.memory_sink import Gate, MemorySink
from tests.support.relay_harness import running, spec
from tests.support.replays import Clients, start

SHORT_LEASE = 3.0


@pytest.mark.fence("settlements of a replay hold up a renewal")
def test_locked_shards_of_a_replay_hold_up_no_lease_of_a_sink(database: Database) -> None:
    """Goes red when one statement renews both."""
    sink, never = MemorySink(), Gate()

    async def hold(_event: StoredEvent, _attempt: int) -> Verdict:
        await never.wait()
        return DELIVERED

    with running(
        database.dsn,
        (spec("s"), sink),
        lease_seconds=SHORT_LEASE,
        replay_client=Clients(lambda: hold, keeps_order=False),
        expects={"lease_lost", "statement_failed"},
    ) as harness:
        delivered(sink, emit(database, [f"k{n}" for n in range(20)]))
        has(database, "select from outbox_internal.backlog(%s, null, 1000, 5.0) where events = 0", "s")
        start(database, since="PT1H")
        has(database, "select from outbox.shard where sink = '~1' and owner is not null limit 1")
        with database.connect() as settlement:
            settlement.execute("select from outbox.shard where sink = '~1' for share")
            [(until,)] = query(database, "select max(lease_until) from outbox.session where sink = '~1'")
            later = "select from outbox.session where sink = 's' and lease_until > %s + interval '3 seconds'"
            has(database, later, until)
        assert harness.loops[0].restarts == {}
