"""The history: what relays add to a minute, what becomes of it with its sink, and how long it is kept."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from outbox_relay.domain.times import lease_clock
from outbox_relay.relay.measures import RelayMeasures, SinkMeasures
from outbox_relay.service.history import History
from outbox_relay.service.metrics import SinkStates, register
from outbox_relay.sinks.contract.handing import an_event
from tests.support.database import Database, query
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import CountingStore, running, spec

SINKS = "select outbox_internal.register_sinks(%s, 0, '3:3:', 3)"
ADDED = """
select sink, sum(delivered), sum(failed), sum(dead), max(backlog), max(oldest_seconds), max(end_to_end_p99),
       sum(busy_ms)
  from outbox.history group by sink order by sink"""


def rows(database: Database) -> list[tuple[Any, ...]]:
    """Return the sums of all minutes by sink."""
    return [(row[0], *(int(count) for count in row[1:4]), *row[4:]) for row in query(database, ADDED)]


def a_row(sink: str, **values: float) -> dict[str, Any]:
    return {"sink": sink, "delivered": 1, "failed": 2, "dead": 3, **values}


@contextmanager
def a_store(database: Database) -> Generator[CountingStore]:
    store = CountingStore(database.dsn)
    store.open()
    try:
        yield store
    finally:
        store.close()


def test_a_relay_adds_what_it_has_done_since_the_last_minute_unless_that_lasted_too_long(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(database.dsn, (spec("s"), MemorySink())) as harness:
        served, process = harness.served["s"], RelayMeasures()
        served.measures = served.loop.parts.measures = SinkMeasures(process, "s")
        register(process.registry, [SinkStates(harness.served)], lambda: True)
        history = History(harness.store, process.registry)
        history.step()
        served.measures.delivered([an_event()] * 3, 0.2, datetime.now(UTC))
        history.step()
        history.step()
        monkeypatch.setattr("outbox_relay.service.history.lease_clock", lambda: lease_clock() + 91.0)
        served.measures.delivered([an_event()], 0.2, datetime.now(UTC))
        history.step()
    [process_row, sink] = rows(database)
    assert (process_row[:4], sink[:4]) == (("", 0, 0, 0), ("s", 3, 0, 0))


def test_two_relays_add_up_counts_and_keep_the_greatest_percentiles(database: Database) -> None:
    query(database, SINKS, Jsonb([{"name": "crm", "patterns": ["*"]}]))
    with a_store(database) as store:
        store.add_history([a_row("crm", end_to_end_p99=1.0, busy_ms=5.0), a_row("unknown"), a_row("")])
        store.add_history([a_row("crm", end_to_end_p99=0.5, busy_ms=7.0, backlog=3), {"sink": "crm"}])
    assert rows(database) == [
        ("", 1, 2, 3, None, None, None, None),
        ("crm", 2, 4, 6, 3, None, 1.0, 12.0),
    ]


def test_minutes_are_kept_for_two_days_and_removed_in_steps(database: Database) -> None:
    insert = (
        "insert into outbox.history (sink, at) select '', now() - n * interval '1 hour' from generate_series(1, 60) n"
    )
    query(database, insert + " returning 1")
    with a_store(database) as store:
        assert [store.value("trim_history", {"most": 10}) for _ in range(3)] == [10, 3, 0]
    [(oldest,)] = query(database, "select now() - min(at) from outbox.history")
    assert oldest < timedelta(days=2)
