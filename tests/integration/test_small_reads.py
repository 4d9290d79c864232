"""Reads of small events: large ones among them are read in the other way, and nothing is lost, repeated or dead."""

from __future__ import annotations

import random

import pytest

from outbox_relay.relay.log_reader import SMALL_BYTES
from tests.support.database import Database, query
from tests.support.deliveries import dead_letters, delivered, ids, in_order
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec

LARGE = b"x" * (SMALL_BYTES + 1)
EMIT = """
select outbox.emit_raw('t', u.payload, key => 'k' || u.n %% 7)
  from unnest(%s::bytea[]) with ordinality u (payload, n)"""


def emit(database: Database, payloads: list[bytes]) -> list[int]:
    """Emit events in one transaction, and return the ids of all events."""
    with database.connect() as connection:
        connection.execute(EMIT, (payloads,))
    return [event for (event,) in query(database, "select id from outbox.event order by id")]


def made(harness: RelayHarness) -> tuple[int, int]:
    """Return how many reads of small events and of every size were made."""
    return harness.store.calls["read_small"], harness.store.calls["read_rest"]


def everything(database: Database, harness: RelayHarness, sink: MemorySink, wanted: list[int]) -> None:
    """Wait until all is delivered, once and in the order of keys, with its payloads, and none is dead."""
    delivered(sink, wanted, seconds=60)
    harness.settled()
    assert sorted(ids(sink)) == wanted
    assert in_order(sink.delivered)
    stored = dict(query(database, "select id, payload from outbox.event"))
    assert {event.id: event.payload for event in sink.delivered} == stored
    assert dead_letters(database) == []
    assert harness.ended == []


@pytest.mark.fence("an event that a read of small events left unread is passed on without contents, or passed by")
@pytest.mark.parametrize("windows", [True, False], ids=["with looks", "without"])
def test_large_events_are_delivered_among_small_ones(database: Database, windows: bool) -> None:
    """Goes red if an unread event is passed on, or if a read that ends before one counts as complete."""
    drawn = random.Random(7)
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.store.windows = windows
        harness.owns_all()
        wanted: list[int] = []
        for part in (0.0, 0.01, 1.0, 0.3, 0.0, 0.001):
            for size in (1, 2, 1500):
                payloads = [LARGE if drawn.random() < part else b"{}" for _ in range(size)]
                wanted = emit(database, payloads)
                delivered(sink, wanted)
        everything(database, harness, sink, wanted)
